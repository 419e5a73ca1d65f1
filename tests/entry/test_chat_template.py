"""Chat templates: Hugging Face's environment, in a sandbox, with errors that name the message."""

import datetime
import json

import pytest

from jaxserve.entry.chat_template import ChatTemplate
from jaxserve.types import CheckpointError, InvalidRequest

USER = [{"role": "user", "content": "hi"}]


def render(source, messages=USER, **variables):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **variables)


def test_blocks_are_trimmed_and_tokens_are_there():
    source = (
        "{{ bos_token }}\n"
        "  {% for message in messages %}\n"
        "{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}\n"
        "  {% endfor %}\n"
        "{% if add_generation_prompt %}go{% endif %}"
    )
    assert render(source) == "<s>\nuser: hi</s>\ngo"
    assert render(source, add_generation_prompt=False) == "<s>\nuser: hi</s>\n"


def test_what_templates_of_hugging_face_may_use():
    assert render("{% for m in messages %}{% if true %}{% break %}{% endif %}x{% endfor %}") == ""
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhic"
    assert render("{{ {'b': 1, 'a': '<é>'} | tojson }}") == '{"b": 1, "a": "<é>"}'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}") == "2"


def test_template_may_refuse_messages():
    with pytest.raises(InvalidRequest, match=r"messages.*roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[5].content.x.y }}",
        "{{ nothing() }}",
        "{% include 'other' %}",
    ],
)
def test_sandbox_and_failures_become_an_invalid_request(source):
    with pytest.raises(InvalidRequest, match="messages"):
        render(source)


def test_internals_are_not_there():
    assert render("{{ raise_exception.__globals__ }}{{ messages.__class__ }}") == ""


def test_template_that_is_no_jinja_is_refused_when_read():
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], r"messages\[0\]"),
        ([*USER, {"content": "x"}], r"messages\[1\]\.role"),
        ([{"role": 5, "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": []}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
    ],
)
def test_malformed_messages_are_named(messages, field):
    with pytest.raises(InvalidRequest, match=field):
        render("{{ messages }}", messages)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"


def test_the_callers_messages_stay_as_they_are():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    render("{{ messages[0].content }}", messages)
    assert messages[0]["content"] == [{"type": "text", "text": "a"}]


def test_folder_forms_in_their_order(tmp_path):
    settings = {"chat_template": "config", "bos_token": {"content": "<s>"}}
    found = ChatTemplate.from_folder(tmp_path, settings)
    assert found is not None
    assert found.render(USER) == "config"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert ChatTemplate.from_folder(tmp_path, settings).render(USER) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja {{ bos_token }}")
    assert ChatTemplate.from_folder(tmp_path, settings).render(USER) == "jinja <s>"
    assert ChatTemplate.from_folder(tmp_path / "none", {}) is None


def test_named_templates_take_the_default(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    found = ChatTemplate.from_folder(tmp_path, {"chat_template": named})
    assert found is not None
    assert found.render(USER) == "d"
    with pytest.raises(CheckpointError, match="tool_use"):
        ChatTemplate.from_folder(tmp_path, {"chat_template": named[:1]})
