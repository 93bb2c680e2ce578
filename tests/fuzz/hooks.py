"""What schemathesis loads: names that reach something, and our own check."""

from __future__ import annotations

from typing import Any

import schemathesis

from service.api.chat.responses import STATEFUL
from service.api.chat.route import RAW_REFUSED as COMPLETIONS_REFUSED
from service.api.chat.schema import REFUSED
from tests.support.tool_samples import TOOLS

SELDOM = (*("chat_template_kwargs", "tool_choice", "response_format", "structured_outputs", "min_tokens", "n"),)
"""Fields for which hardly anything that is drawn gets an answer."""


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Drawn names of models and roles reach nothing but a 404: most are replaced by ones that exist."""
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) != 1:
        body["model"] = "voxcpm2" if "/audio/" in context.operation.path else "qwen2_vl"
        messages = body.get("messages")
        for message in messages if isinstance(messages, list) else []:
            if isinstance(message, dict) and isinstance(message.get("role"), str):
                message["role"] = ("user", "assistant", "system")[len(message["role"]) % 3]
        if isinstance(messages, list) and len(body) % 4:
            body["messages"] = [{"role": "user", "content": "Hello."}]
            for name in (*REFUSED, *SELDOM):
                body.pop(name, None)
            if body.get("tools"):
                body["tools"] = TOOLS
    if isinstance(body, dict) and context.operation.path == "/v1/responses" and len(body) % 4:
        body["input"] = "Hello."
        for name in (*STATEFUL, *SELDOM, "text", "tools"):
            body.pop(name, None)
    elif isinstance(body, dict) and context.operation.path == "/v1/completions" and len(body) % 4:
        body["prompt"] = "Hello."
        for name in (*COMPLETIONS_REFUSED, *SELDOM):
            body.pop(name, None)
    elif isinstance(body, dict) and isinstance(body.get("input"), str) and len(body) % 2:
        body |= {"input": "Hello.", "max_len": 3}
        for name in (
            *("model", "voice", "ref_audio", "ref_text", "prompt_audio", "prompt_text", "instructions", "sample_rate"),
            "inference_timesteps",
        ):
            body.pop(name, None)
    return body


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    if path_parameters and "name" in path_parameters:
        path_parameters["name"] = "voxcpm2"
    return path_parameters


@schemathesis.check
def only_503_with_retry_after(context: Any, response: Any, case: Any) -> None:
    if response.status_code >= 500:
        assert response.status_code == 503 and "retry-after" in response.headers, f"status {response.status_code}"
