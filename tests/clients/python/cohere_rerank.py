"""Cohere's client for rerank. Arguments: URL, model."""

import json
import sys

import cohere

url, model = sys.argv[1:]
client = cohere.Client("none", base_url=url.removesuffix("/v1"))
ranked = client.rerank(
    model=model, query="what is this ?", documents=["a red circle", ""], top_n=2, return_documents=True
)
results = [[result.index, result.relevance_score, result.document.text] for result in ranked.results]
print(json.dumps({"id": ranked.id, "results": results}))
