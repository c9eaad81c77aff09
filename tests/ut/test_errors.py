"""Typed errors: what they say, what they are, and that they survive the way between processes.

Proves the classes and the environment table; where each error is raised is tested beside the code that raises it.
"""

import inspect
import pickle
import subprocess
import sys

import pytest

from vllm_ascend_moe import envs, errors

VALUE_ERRORS = [
    cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, errors.InvalidValueError)
]


@pytest.mark.parametrize("cls", VALUE_ERRORS, ids=lambda cls: cls.__name__)
def test_a_value_error_names_field_value_limit_and_action(cls):
    error = cls("tokens", 5, "at most 4", "Send fewer.")
    assert str(error) == "tokens = 5, but it must be at most 4. Send fewer."
    assert (error.field, error.value, error.limit, error.action) == ("tokens", 5, "at most 4", "Send fewer.")
    assert isinstance(error, ValueError)
    assert isinstance(error, errors.AscendMoEError)


@pytest.mark.parametrize("cls", VALUE_ERRORS, ids=lambda cls: cls.__name__)
def test_a_value_error_is_pickled_whole(cls):
    """An engine process sends its error to the front end."""
    error = cls("tokens", (1, "x"), "at most 4", "Send fewer.")
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is cls
    assert str(copied) == str(error)
    assert copied.value == (1, "x")


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.DtypeError, TypeError),
        (errors.MissingDependencyError, ImportError),
        (errors.UnsupportedError, NotImplementedError),
    ],
    ids=lambda cls: cls.__name__,
)
def test_errors_are_also_the_builtin_kind_that_callers_expect(cls, builtin):
    assert issubclass(cls, builtin)
    assert issubclass(cls, errors.AscendMoEError)


def test_every_error_has_a_docstring_and_the_common_base():
    classes = [cls for cls in vars(errors).values() if inspect.isclass(cls)]
    assert len(classes) >= 8
    for cls in classes:
        assert issubclass(cls, errors.AscendMoEError)
        assert cls.__doc__


# -- environment -----------------------------------------------------------------------------------------------


def test_names_are_ours():
    """vLLM refuses names it does not know that begin with VLLM_."""
    assert envs.TABLE
    assert all(name.startswith("ASCEND_MOE_") for name in envs.TABLE)


def test_defaults_are_values_their_own_parser_accepts(monkeypatch):
    for name, var in envs.TABLE.items():
        monkeypatch.delenv(name, raising=False)
        assert envs.get(name) == var.parse(name, var.default)
        assert var.help


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True)])
def test_a_switch_is_read_at_each_call(monkeypatch, text, value):
    monkeypatch.setenv("ASCEND_MOE_ENABLE", text)
    assert envs.get("ASCEND_MOE_ENABLE") is value


@pytest.mark.parametrize("text", ["", "true", "yes", "2", " 1"])
def test_a_switch_with_another_value_is_an_error_that_names_it(monkeypatch, text):
    monkeypatch.setenv("ASCEND_MOE_ENABLE", text)
    with pytest.raises(errors.ConfigError, match=r"ASCEND_MOE_ENABLE = .* must be 0 or 1"):
        envs.get("ASCEND_MOE_ENABLE")


def test_an_unknown_variable_is_a_key_error():
    with pytest.raises(KeyError):
        envs.get("ASCEND_MOE_NO_SUCH")


def test_errors_and_envs_need_the_standard_library_alone():
    code = "import sys; sys.modules['torch'] = None; from vllm_ascend_moe import envs, errors"
    subprocess.run([sys.executable, "-c", code], check=True)
