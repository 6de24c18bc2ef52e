"""Reads defaults of options from the conf file, and hides credentials in the values of options."""

from __future__ import annotations

import configparser
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark_lookup.core.credentials import names_secret, without_url_credentials
from pyspark_lookup.errors import OptionError, raise_ours

STORAGE = "lookup.storage."
_USER_PARAMETER = re.compile(r"(://[^?]*\?(?:[^#]*&)?user=)[^&#]*")


def redact(key: str, value: object) -> str:
    """An option's value, as text for messages: `[redacted]` for a credential, and for JSON that contains one.

    A credential in a URL is hidden. In a path, a parameter `user` is hidden, too, and line breaks are escaped.
    """
    text = _without_secrets(key, value)
    if key == "path":
        text = _USER_PARAMETER.sub(r"\1[redacted]", text).replace("\n", "\\n").replace("\r", "\\r")
    return text


def _without_secrets(key: str, value: object) -> str:
    stack: list[Any] = [{key: value if isinstance(value, (dict, list)) else storage_value(value)}]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if any(map(_looks_secret, item)):
                return "[redacted]"
            stack += item.values()
        elif isinstance(item, list):
            stack += item
    return without_url_credentials(str(value))


def _looks_secret(key: str) -> bool:
    """Whether an option's name says that its value is a credential."""
    return key not in ("lookup.keys", "lookup.key") and names_secret(key)


def tells_secret(key: str, value: object) -> bool:
    """Whether the value of an option is a credential, or contains one, e.g. in a URL."""
    return _without_secrets(key, value) != str(value)


def storage_value(text: object) -> Any:
    """The value of a `lookup.storage.*` option, as fsspec expects it: decoded if the text is JSON, such as `true` or `5`; otherwise the text."""
    try:
        return json.loads(str(text))
    except (ValueError, RecursionError):
        return str(text)


def conf_file_options(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The options in the file that `$LOOKUPCACHE_CONF` names, or else in `$SPARK_CONF_DIR/lookupcache.conf`; {} if there is no such file.

    Each line is `key = value`; a `#` at the start of a line or after a space begins a comment. Raises OptionError for a file that cannot be
    read or parsed, and if the file that `$LOOKUPCACHE_CONF` names does not exist. The error quotes no line: it may have a credential.
    """
    conf_path = environ.get("LOOKUPCACHE_CONF")
    spark_conf = environ.get("SPARK_CONF_DIR")
    if not conf_path and not spark_conf:
        return {}
    path = Path(conf_path) if conf_path else Path(spark_conf or "") / "lookupcache.conf"
    parser = configparser.ConfigParser(
        delimiters=("=",), comment_prefixes=("#",), inline_comment_prefixes=("#",), interpolation=None
    )
    try:
        lines = path.read_text(encoding="utf-8")
    except FileNotFoundError as problem:
        if not conf_path:
            return {}
        raise_ours(
            OptionError(f"conf file {path} ($LOOKUPCACHE_CONF) does not exist: correct or unset the variable"), problem
        )
    except OSError as problem:
        raise_ours(OptionError(f"conf file {path} cannot be read: {problem}"), problem)
    except UnicodeDecodeError as problem:
        complaint: str | None = f" cannot be read: {problem}"
    else:
        complaint = _parse(parser, lines)
    if (
        complaint is not None
    ):  # raised outside of `except`: the parser's error, which quotes the line, must not be the context of this one
        raise OptionError(f"conf file {path}{complaint}")
    if parser.sections() != ["conf"] or parser.defaults():
        raise OptionError(f"conf file {path}: expected lines of key = value without [sections]")
    options = dict(parser["conf"])
    for key, text in options.items():
        if "\n" in text:  # to the parser, an indented line continues the line before
            raise OptionError(f"conf file {path}: the line after {key} is indented: start every line with its key")
    return options


def _parse(parser: configparser.ConfigParser, lines: str) -> str | None:
    """Parse the lines of a conf file. Returns the rest of an error's text, after the file's name; None if all lines can be parsed."""
    try:
        parser.read_string("[conf]\n" + lines)
    except configparser.DuplicateOptionError as problem:
        return f", line {(problem.lineno or 1) - 1}: {problem.option} is set twice: remove one of the lines"
    except configparser.ParsingError as problem:
        return f", line {problem.errors[0][0] - 1}: expected key = value"
    except configparser.Error:
        return ": expected lines of key = value without [sections]"
    return None


def conf_file_secrets(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The credentials among the conf file's `lookup.storage.*` options, by parameter. They are used on this host, and never put into a plan."""
    secrets: dict[str, Any] = {}
    for key, text in conf_file_options(environ).items():
        if key.startswith(STORAGE) and tells_secret(key, text):
            value = storage_value(text)
            # A password of digits must stay text.
            secrets[key.removeprefix(STORAGE)] = value if isinstance(value, (dict, list)) else text
    return secrets
