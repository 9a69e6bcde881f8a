"""What a request says its answer must look like, in OpenAI's fields or in vLLM's."""

from __future__ import annotations

from penstock.engine.structure import StructuredOutputsParams
from penstock.errors import ConfigError
from penstock.server.errors import ApiError
from penstock.server.schema import GenerationRequest

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def structure_field(request: GenerationRequest) -> str | None:
    """The field that says so, if there is one."""
    names = ("structured_outputs", *_GUIDED, "response_format")
    return next((name for name in names if getattr(request, name) is not None), None)


def answer_structure(request: GenerationRequest) -> StructuredOutputsParams | None:
    """None if any text will do. Raises ApiError if the fields are invalid or contradict."""
    wanted: dict[str, dict[str, object]] = {}
    form = request.response_format
    if form is not None and form.type == "json_object":
        wanted["response_format"] = {"json_object": True}
    if form is not None and form.json_schema is not None:
        schema = {} if form.json_schema.schema_ is None else form.json_schema.schema_
        wanted["response_format"] = {"json": schema, "strict": bool(form.json_schema.strict)}
    if request.structured_outputs is not None:
        given = request.structured_outputs.model_dump(exclude_none=True, by_alias=True)
        if given:
            wanted["structured_outputs"] = given
    for name, kind in _GUIDED.items():
        if getattr(request, name) is not None:
            wanted[name] = {kind: getattr(request, name)}
    if len(wanted) > 1:
        raise ApiError(
            400,
            f"{' and '.join(wanted)} are given together: expected one of them, because each says "
            "what the answer must look like; leave the others out.",
            param=list(wanted)[1],
        )
    for param, fields in wanted.items():
        try:
            return StructuredOutputsParams.of(fields)
        except ConfigError as error:
            raise ApiError(400, f"{error}.", param=param) from None
    return None
