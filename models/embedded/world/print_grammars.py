# ruff: noqa: E501 - a grammar reads best on one line.

"""Wordings of questions about printed text and charts, by task."""

from __future__ import annotations

PRINTS: dict[str, tuple[str, ...]] = {
    "describe_chart": (
        "(describe|explain|read|summarize|transcribe) (the|this|my) (chart|diagram|graph|plot)[ to me| for me| please| in detail| in one sentence| briefly]",
        "(please |can you )(describe|explain|read|summarize) (the|this|my) (chart|diagram|graph|plot)[ to me| for me]",
        "what does (the|this|my) (chart|diagram|graph|plot) (show|say|contain|tell)",
        "what (is|do you see|can you see|is shown) (in|on) (the|this|my) (chart|diagram|graph|plot)",
        "(list|name|tell me|give me|read|what are) (all|the|all the) (values|numbers|labels and values|bars and their values|data)[ (in|of|on) (the|this|my) (chart|diagram|graph|plot)]",
    ),
    "chart_title": (
        "(what is|tell me|read|give me|say|name) the (title|heading|headline)[ (of|in|on) (the|this|my) (chart|diagram|graph|plot|picture|image)]",
        "(what|which) (title|heading|headline) (has|is over|do you see over) (the|this|my) (chart|diagram|graph|plot)",
        "what (title|heading|headline) does (the|this|my) (chart|diagram|graph|plot) have",
        "(what|how) is (the|this|my) (chart|diagram|graph|plot) (called|named|titled)",
        "what does the (title|heading|headline) say",
        "(does|do) (the|this|my) (chart|diagram|graph|plot) have a (title|heading|headline)",
    ),
    "chart_labels": (
        "(what are|tell me|read|give me|list|name) (the|all|all the) (labels|names|categories)[ (of|in|on) (the|this|my) (chart|diagram|graph|plot|picture|image)| of the bars| of the parts]",
        "(what|which) (labels|names|categories) (do you see|can you see|are there|are shown|does it have)[ (in|on) (the|this|my) (chart|diagram|graph|plot)]",
        "(what|which) (labels|names|categories) (does|do) (the|this|my) (chart|diagram|graph|plot) (have|show|contain)",
        "(what|how) are the (bars|parts|slices) (called|named|labeled)",
    ),
    "read": (
        "what does (it|this|that) say[ here]",
        "(read|transcribe) (it|this|that|everything|the image|the picture)[ to me| for me| please| aloud]",
        "(please |can you )(read|transcribe) (it|this|that|the text|the image|the picture)[ to me| for me]",
        "what (is|stands|do you see) (written|printed) (here|there|on it|in it)",
        "(is there|do you see|can you see) (any|some) (text|writing)[ (in|on) (the|this|my) (picture|image)| here]",
        "(what|any|which) text (is|can be seen) (in|on) (the|this|my) (picture|image)",
        "what does (the|this) (text|sign|label|writing|print) (say|read)[ (in|on) (the|this) (picture|image)]",
        "(read|spell|transcribe|copy) the (text|sign|label|writing|words)[ (in|on) (the|this) (picture|image)| for me| aloud| please]",
        "what (is written|is printed|text is there|text do you see|text is shown|can you read|do you read)[ (in|on) (the|this) (picture|image)| here]",
        "(what is|tell me|give me) the (text|writing)[ (in|on) (the|this) (picture|image)| here]",
        "(which|what) (word|words|text|letters) (do you see|can you see|can you read|is printed|is written|is there)[ here]",
        "(tell me|say) what (the text says|is written|the sign says|you can read|is printed|the label says)[ here| in the picture]",
    ),
    "read_line": (
        "(please |can you )(read|copy|spell|tell me|say) the {nth} line[ to me| for me| aloud| of the text]",
        "what does the {nth} line (say|read)[ (in|on|of) (the|this) (picture|image)]",
        "(read|spell|transcribe|copy) the {nth} line[ (in|on|of) (the|this) (picture|image|text)| for me| aloud| please]",
        "what (is written|is printed|do you read|can you read) in the {nth} line[ of (the|this) (text|picture|image)]",
        "(what is|tell me|give me) the {nth} line[ of (the|this) (text|picture|image)| of text]",
        "(which|what) (word|words|text|letters) (is|are|do you see) in the {nth} line",
    ),
    "lines": (
        "(please |can you )(count|name the number of|tell me the number of|say the number of) (the lines|lines)[ of text][ (in|on) (the|this) (picture|image|sign|label)]",
        "(how many|what number of) lines[ of text] (does|do) (the|this) (picture|image|text|sign|label) (have|show|contain)",
        "how many lines (of text )(are there|do you see|can you see|are in the picture|are in the image|are printed)",
        "how many lines (are there|do you see|can you see|does the text have|are printed|does the sign have)[ here]",
        "(count|please count) the lines[ of text][ in (the|this) (picture|image)]",
        "(what is|tell me|give me) the number of lines[ of text][ in (the|this) (picture|image)]",
        "(tell me|say) how many lines[ of text] (there are|you see|are printed|you can see)",
    ),
    "ink": (
        "(what|which) (color|colour) (is|has) the (text|writing|print)[ (in|on) (the|this) (picture|image)| here]",
        "(what is|tell me|name|say|give me) the (color|colour) of the (text|writing|print|letters)[ (in|on) (the|this) (picture|image)]",
        "(in|of) (what|which) (color|colour) is the (text|writing|print)[ written| printed]",
        "(tell me|say) (what|which) (color|colour) the (text|writing|print) (is|has)",
    ),
    "chart_most": (
        "(what|which) (bar|part|slice|label|one|value) is (the {most}|{most})[ (in|on) (the|this) (chart|graph|picture|image)| here]",
        "(what|which) (label|name|one|bar|slice) has the {most} (value|number|share|amount|bar|slice)[ in (the|this|my) (chart|graph)]",
        "(name|tell me|give me|find) the (label|name|bar|part|slice) (with|of) the {most} (value|number|share)",
        "(name|tell me|give me|find|what is) the {most} (bar|value|share|part|slice)[ (in|on) (the|this) (chart|graph|picture|image)]",
        "(tell me|say) (what|which) (bar|part|slice|label|one) is the {most}",
    ),
    "chart_value": (
        "(what is|tell me|give me|read|say) the (value|number|share|amount) (of|for|at) {label}[ in (the|this) (chart|graph|picture|image)]",
        "(what|which) (value|number|share|amount) (has|is) {label}[ in (the|this|my) (chart|graph)]",
        "how (much|large|big|high|many) is {label}[ in (the|this) (chart|graph|picture|image)]",
        "(what|which) (value|number|share|amount) does {label} have[ in (the|this) (chart|graph|picture|image)]",
        "(what does the chart|what does this chart|what does the graph) (say|show|give) for {label}",
        "(tell me|say) how (much|large|big|high|many) {label} is[ in (the|this|my) (chart|graph)]",
    ),
    "chart_kind": (
        "(please |can you )(tell me|say|name) (what|which) (kind|type|sort) of (chart|graph) (this|it|that) is[ please]",
        "(what|which) (kind|type|sort) of (chart|graph) is (this|it|that|shown|here)[ in (the|this) (picture|image)]",
        "is (this|it|that) a bar chart or a pie chart",
        "(name|tell me|say|what is) the (kind|type|sort) of[ the| this] (chart|graph)",
        "(what|which) (kind|type|sort) of (chart|graph) (do|can) you see[ here| in the picture| in the image]",
        "(tell me|say) (what|which) (kind|type|sort) of (chart|graph) (this|it) is",
    ),
    "chart_bars": (
        "how many (bars|parts|slices|labels|values) (are there|do you see|can you see|are shown|does it have)[ here]",
        "how many (bars|parts|slices|labels|values) (does|do) (the|this) (chart|graph|picture|image) (show|have|contain)",
        "(count|please count) the (bars|parts|slices|labels|values)[ in (the|this|my) (chart|graph)| for me]",
        "(what is|tell me|give me) the number of (bars|parts|slices|labels|values)[ in (the|this|my) (chart|graph)]",
    ),
}
