"""A chat template from a stranger ends in an error: it runs nothing, and neither time nor memory without bound."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from toque.errors import TemplateError
from toque.text.template import ChatTemplate

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "x", "list": [1, [2]], "map": {"a": 1}}]


def refused(source: str) -> TemplateError:
    begun = time.thread_time()
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert time.thread_time() - begun < 2.0
    assert (caught.value.status, len(caught.value.message) < 700) == (400, True)
    return caught.value


# field case BR-030
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ joiner.__init__.__globals__['os'].system('touch MARK') }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['datetime'] }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__closure__[0].cell_contents }}",
    "{{ dict.__call__.__globals__ }}",
    "{{ (messages | map('attr', '__class__') | list)[0].__base__ }}",
    "{{ messages | attr('__class__') | attr('__mro__') }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ '%s' | format(''.__class__) }}",
    "{% set f = ''.format %}{{ f.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "{{ loop.__init__ }}{% for i in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% set ns = namespace(_x=1) %}",
    "{{ (1).__class__.__bases__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0]['list'].pop() }}",
    "{{ messages[0]['map'].clear() }}",
    "{{ environment.sized.__globals__ }}",
    "{{ context.environment.globals }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_reaching_for_the_interpreter_is_refused(source: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    error = refused(source.replace("MARK", str(mark)))
    assert error.error_code in ("chat_template_security", "chat_template_error")
    assert not mark.exists()


def test_the_usual_escape_is_called_a_security_error() -> None:
    assert refused("{{ ''.__class__.__mro__ }}").error_code == "chat_template_security"
    assert refused("{{ messages.append(1) }}").error_code == "chat_template_security"


def test_callers_data_is_never_changed() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x", "list": [1]}]
    template = ChatTemplate("{% set x = messages[0] %}{% for k in x %}{% endfor %}{{ x }}{{ x.pop('role') }}")
    with pytest.raises(TemplateError):
        template.render(messages)
    assert messages == [{"role": "user", "content": "x", "list": [1]}]


DOUBLING = "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 60
BOMBS = [
    "{% for i in range(1000000000) %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% set x = 1 %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set ns = namespace(d=0) %}{% block b %}{% set ns.d = ns.d + 1 %}{{ self.b() if ns.d < 2000000 }}{% endblock %}",
    "{% for a in [[1, 2]] * 20 recursive %}{{ loop([a] * 20) }}{% endfor %}",
    "{{ 'a' * 1000000000 }}",
    "{{ ['a'] * 1000000000 }}",
    "{{ 10 ** 10000000 }}",
    "{% set ns = namespace(x=7) %}{% for i in range(100) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ 'x'.zfill(1000000000) }}",
    "{{ '\t'.expandtabs(1000000000) }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ 'x' | indent(1000000000) }}",
    "{{ [1] | batch(1000000000, 'x') | list }}",
    "{{ range(100000) | map('center', 100000) | join }}",
    "{% set a = 'x' * 10000000 %}{{ a.replace('', a) }}",
    "{% set a = 'x' * 10000000 %}{{ a | replace('x', a) }}",
    "{% set a = 'x' * 10000000 %}{{ a.join('y' * 10000) }}",
    "{% set a = 'x' * 10000000 %}{{ ('y' * 10000) | list | join(a) }}",
    DOUBLING,
    "{% set x = 'ab' %}" + "{% set x = x + x %}" * 60,
    "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "{% set x = [1] %}" + "{% set x = (x, x) %}" * 60 + "{{ x == x }}",
    "{% set x = [1] %}" + "{% set x = {'a': x, 'b': x} %}" * 60 + "{{ x | tojson }}",
    "{% set x = [1] %}" + "{% set x = dict(a=x, b=x) %}" * 60 + "{{ x | tojson }}",
    "{% set x = [1] %}" + "{% set x = x + x %}" * 60,
    "{% set x = [1] %}" + "{% set x = [x] | batch(2, x) | list %}" * 60 + "{{ x | string }}",
    "{% set x %}{% for i in range(100000) %}" + "y" * 900_000 + "{% endfor %}{% endset %}",
    "{% for i in range(100000) %}" + "y" * 900_000 + "{% endfor %}",
    "{{ range(100000) | batch(1) | sum(start=[]) }}",
    "{{ {'a': 1} | tojson(indent=1000000) }}",
    "{{ strftime_now('%1000000000Y') }}",
    "{{ strftime_now('x' * 1000000) }}",
    "{{ lipsum(n=100000000) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'x' as y %}",
]


@pytest.mark.parametrize("source", BOMBS, ids=[str(index) for index in range(len(BOMBS))])
def test_work_and_memory_are_bounded(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB


def test_an_endless_loop_lets_others_run() -> None:
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.005):
            ticks.append(time.perf_counter())

    other = threading.Thread(target=tick)
    other.start()
    try:
        error = refused("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}")
    finally:
        done.set()
        other.join()
    assert error.error_code == "chat_template_limit"
    assert len(ticks) > 20


def test_templates_do_not_share_their_budget() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    for _ in range(200):
        assert template.render([{"role": "user", "content": "x" * 400_000}]) == "x" * 400_000


def test_long_conversations_are_within_the_limits() -> None:
    source = (
        "{% set ns = namespace(kept=[]) %}{% for m in messages %}{% set ns.kept = ns.kept + [m] %}{% endfor %}"
        "{% for m in ns.kept %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>{% endfor %}"
    )
    messages = [{"role": "user", "content": "x" * 1000}] * 1000
    assert len(ChatTemplate(source).render(messages)) == 1000 * (1000 + len("<|im_start|>user\n<|im_end|>"))


def test_messages_nested_too_deep_are_refused() -> None:
    deep: Any = "x"
    for _ in range(500):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested"):
        ChatTemplate("{{ messages }}").render([{"role": "user", "content": "x", "deep": deep}])
