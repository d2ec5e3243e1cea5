"""The OpenAPI description of the server: it is valid, and the server behaves as it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzzing import example_settings
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft4Validator
from openapi_spec_validator import validate
from serving import Answer, Running, change_config, running, tiny_folder

from nmt.config import Engine, ServeConfig
from nmt.data.tokenizer import Tokenizer
from nmt.serve import api, v1
from nmt.serve.models import Models

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"
POST_ROUTES = ["/translate", "/detect", "/suggest", "/v1/translate", "/v1/attention"]
BODIES = [(path, JSON) for path in POST_ROUTES]
FORM_ROUTES = ["/translate", "/detect", "/suggest"]
BODIES += [(path, media_type) for path in FORM_ROUTES for media_type in (FORM, MULTIPART)]
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Running]:
    """A server that translates in both directions, and stores suggestions."""
    folder = tmp_path_factory.mktemp("openapi")
    model_dir = []
    for src_lang, tgt_lang in (("xx", "yy"), ("yy", "xx")):
        model = tiny_folder(folder / src_lang, tokenizer)
        change_config(model, src_lang=src_lang, tgt_lang=tgt_lang)
        model_dir.append(str(model))
    config = ServeConfig(model_dir=model_dir, device="cpu", num_workers=0, backend=Engine.native)
    with running(Models.load(config), suggestions=str(folder / "suggestions.jsonl")) as server:
        yield server


@pytest.fixture(scope="module")
def spec(server: Running) -> dict[str, Any]:
    return server.get("/spec").json  # type: ignore[no-any-return]


def to_json_schema(schema: Any, spec: dict[str, Any]) -> Any:
    """Return a schema of OpenAPI 3.0 as JSON Schema, without references."""
    if isinstance(schema, list):
        return [to_json_schema(item, spec) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return to_json_schema(spec["components"]["schemas"][name], spec)
    converted = {name: to_json_schema(value, spec) for name, value in schema.items()}
    if converted.pop("nullable", False):
        converted["type"] = [converted["type"], "null"]
    return converted


def values_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Generate values of a schema from `to_json_schema`."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "oneOf" in schema:
        return st.one_of([values_of(choice) for choice in schema["oneOf"]])
    type_name = schema["type"]
    if isinstance(type_name, list):
        return st.none() | values_of({**schema, "type": type_name[0]})
    low = schema.get("minimum")
    high = schema.get("maximum")
    if type_name == "integer":
        return st.integers(low, high)
    if type_name == "number":
        return st.floats(low, high)
    if type_name == "boolean":
        return st.booleans()
    if type_name == "string":
        texts = st.text(min_size=schema.get("minLength", 0), max_size=40)
        if "pattern" in schema:
            texts = texts.filter(re.compile(schema["pattern"]).search)
        return texts
    if type_name == "array":
        items = values_of(schema["items"])
        return st.lists(
            items, min_size=schema.get("minItems", 0), max_size=min(schema.get("maxItems", 4), 4)
        )
    required = {name: values_of(schema["properties"][name]) for name in schema.get("required", ())}
    properties = {name: values_of(value) for name, value in schema["properties"].items()}
    optional = {name: values for name, values in properties.items() if name not in required}
    return st.fixed_dictionaries(required, optional=optional)


def request_schema(spec: dict[str, Any], path: str, media_type: str) -> dict[str, Any]:
    content = spec["paths"][path]["post"]["requestBody"]["content"]
    return to_json_schema(content[media_type]["schema"], spec)  # type: ignore[no-any-return]


def check_answer(answer: Answer, spec: dict[str, Any], path: str) -> None:
    """Check that the status and the body of a response are described."""
    responses = spec["paths"][path]["post"]["responses"]
    assert str(answer.status) in responses, answer
    response = responses[str(answer.status)]
    if "$ref" in response:
        response = spec["components"]["responses"][response["$ref"].rsplit("/", 1)[1]]
    media_type = answer.headers["content-type"].split(";")[0]
    schema = to_json_schema(response["content"][media_type]["schema"], spec)
    if media_type == JSON:
        Draft4Validator(schema).validate(answer.json)


def send(server: Running, path: str, media_type: str, params: dict[str, Any]) -> Answer:
    """Send parameters in a body of a media type."""
    if media_type == JSON:
        return server.post(path, **params)
    if media_type == FORM:
        return server.form(path, **params)
    return server.multipart(path, params)


def test_the_description_is_valid_openapi(spec: dict[str, Any]) -> None:
    validate(spec)
    static_file = Path(api.__file__).parent / "static/openapi.json"
    validate(json.loads(static_file.read_text(encoding="utf-8")))


def test_every_route_of_the_api_is_described(spec: dict[str, Any]) -> None:
    for route in [*api.ROUTES, *v1.ROUTES]:
        path = route.path.replace(":path", "")
        methods = {method.lower() for method in route.methods or ()} - {"head"}
        assert set(spec["paths"][path]) == methods, path


def test_languages_and_limits_are_those_of_the_server(
    server: Running, spec: dict[str, Any]
) -> None:
    schemas = spec["components"]["schemas"]
    assert schemas["Source"]["enum"] == ["auto", "xx", "yy"]
    assert schemas["Target"]["enum"] == ["xx", "yy"]
    assert schemas["BeamSize"]["maximum"] == server.service.config.max_beam_size
    assert schemas["NBest"]["maximum"] == server.service.config.max_beam_size


def test_health_is_exactly_the_answer_of_libretranslate(server: Running) -> None:
    assert server.get("/health").json == {"status": "ok"}


@pytest.mark.parametrize("path", FORM_ROUTES)
def test_all_types_of_bodies_get_the_same_answer(
    server: Running, spec: dict[str, Any], path: str
) -> None:
    params = {"q": "the house", "s": "das Haus", "source": "xx", "target": "yy"}
    content = spec["paths"][path]["post"]["requestBody"]["content"]
    assert set(content) == {JSON, FORM, MULTIPART}
    answers = [send(server, path, media_type, params) for media_type in content]
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert answers[0].json == answers[1].json == answers[2].json


@pytest.mark.slow
@pytest.mark.parametrize(("path", "media_type"), BODIES)
def test_requests_of_the_schema_are_answered(
    server: Running, spec: dict[str, Any], path: str, media_type: str
) -> None:
    schema = request_schema(spec, path, media_type)

    @example_settings(12)
    @given(params=values_of(schema))
    def run(params: dict[str, Any]) -> None:
        answer = send(server, path, media_type, params)
        assert answer.status in (200, 404, 409), answer
        check_answer(answer, spec, path)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("path", POST_ROUTES)
def test_requests_outside_of_the_schema_are_refused(
    server: Running, spec: dict[str, Any], path: str
) -> None:
    schema = request_schema(spec, path, JSON)
    validator = Draft4Validator(schema)

    @example_settings(12)
    @given(data=st.data(), params=values_of(schema), name=st.sampled_from([*schema["properties"]]))
    def run(data: st.DataObject, params: dict[str, Any], name: str) -> None:
        if name in schema["required"] and data.draw(st.booleans()):
            del params[name]
        else:
            params[name] = data.draw(ANY_JSON)
        assume(not validator.is_valid(params))
        answer = server.post(path, **params)
        assert answer.status == 400, (params, answer)
        check_answer(answer, spec, path)

    run()


@pytest.mark.slow
def test_each_text_file_of_the_schema_is_translated(server: Running, spec: dict[str, Any]) -> None:
    """The file is text in UTF-8, which OpenAPI has no format for."""
    path = "/translate_file"
    properties = request_schema(spec, path, MULTIPART)["properties"]
    del properties["file"]
    fields = {"type": "object", "required": ["source", "target"], "properties": properties}

    @example_settings(12)
    @given(params=values_of(fields), text=st.text())
    def run(params: dict[str, Any], text: str) -> None:
        answer = server.upload("text.txt", text.encode(), **params)
        assert answer.status == 200, answer
        check_answer(answer, spec, path)

    run()
    answer = server.upload("text.txt", b"\x89PNG\r\n", source="xx", target="yy")
    assert answer.status == 400
    assert "the file is not UTF-8 (byte 1); convert it" in answer.json["error"]
