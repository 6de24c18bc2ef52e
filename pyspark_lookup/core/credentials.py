"""Makes text from outside, such as paths and error messages, safe to show: hides credentials, and escapes characters that could control a
terminal."""

from __future__ import annotations

import base64
import contextlib
import difflib
import html
import json
import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote, unquote_plus, urlsplit

_NAMES_SHOWN = 30
_NAMES_COMPARED = 1000


def printable(text: str, lines: bool = False) -> str:
    """The text with its unprintable characters escaped, so that it cannot control a terminal. If `lines` is true, line ends stay."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or (lines and char == "\n") else char.encode("unicode_escape").decode()
        for char in text
    )


def names_shown(names: Sequence[str], unknown_name: str = "") -> str:
    """The known `names` as text for an error about `unknown_name`: the first 30, and the name that was probably meant."""
    more = f", … ({len(names)} in all)" if len(names) > _NAMES_SHOWN else ""
    spelled = {name.lower(): name for name in names[:_NAMES_COMPARED]}
    close_names = difflib.get_close_matches(unknown_name.lower(), spelled, 1, 0.7)
    return (
        ", ".join(names[:_NAMES_SHOWN]) + more + "".join(f": did you mean {spelled[name]!r}?" for name in close_names)
    )


LOGIN_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie"})
"""Headers of HTTP requests that usually have a credential, in lower case."""
_SHORTEST_PART = 6  # characters: shorter parts of a header, such as a language in a cookie, are no credentials
_HIDDEN = "[redacted]"
_OF_KEYS = (
    "access|account|api|auth|client|consumer|encrypt(?:ion)?|functions?|hmac|host|license|management|master|private|"
    "secret|service|shared|signing|ssh|storage|subscription"
)
_NAME = (
    r"(?:secret[\w.-]{0,40}|passw[\w.-]{0,40}|pass[._-]?phrase|pass[._-]?code|(?<![a-z])(?:user|db|pg)?[._-]?pass|pwd|(?<![a-z])(?:pw|psk|jwt|bearer)|"
    r"tokens?|credentials?|signature|(?<![a-z])sig|(?<![a-z])sas|(?:api|access|account|private|secret) keys?|"
    rf"(?:{_OF_KEYS})[._-]?(?:access[._-]?)?keys?|(?:encryption|sse)[._-]?customer[._-]?key|client[._-]?assertion|(?<![a-z])auth|authorization|"
    r"authentication|cookies?|session[._-]?(?:id|key)|connection[._-]?string|identified\s{1,3}by)"
)
_SUFFIX = r"(?:[._-]?(?:id|value|string|data|json|pem|hash|b64|base64|file|text|\d{1,3})|\.[\w.-]{1,60})?"
_QUOTED = r"""\\*[bBrRuU]?(?P<{0}>\\*["'])(?:(?P={0})(?P={0})|(?!(?P={0})(?!\w))(?:\\.|.))*(?:(?P={0})|$)"""
_BRACED = r"\{(?:[^{}]|\{[^{}]*\}|\}\})*\}"  # as in ODBC, or JSON
_PLAIN = r"""[^\s&;"'<>]+(?:["'][^\s&;"'<>,)\]}}]+)*"""

_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z0-9 ]*-----|$)", re.S)
_USER = re.compile(
    r"""(?i)\b([a-z][a-z0-9+.-]{0,30}://)((?:[^\s/:@?#"']*:(?!\d{1,5}[/?#])[^\s@<>"']*@(?:[^/?#\s@"']*@)*|[^/?#\s]+@))"""
)
_KEY_PAIR = re.compile(r"""(?i)\b((?:s3[an]?|gs|gcs|oss|cosn)://)([^\s/:@]*:[^\s@<>"']*@(?:[^/?#\s@"']*@)*)""")
# Where a URL is known to be the whole text, or ends at a quote, what is before its @ may have any character, also spaces.
_BUCKET_USER = re.compile(
    r"(?i)(?:(?:s3[an]?|gs|gcs|oss|cosn)://(?:[^/?#]*@|[^/:@]*:[^@]*@)|(?:abfss?|wasbs?)://[^/?#@]*:[^@]*@)"
)
_WHOLE_USER = re.compile(
    r"(?i)\A(\s*(?!file:|local:|sqlite|duckdb)[a-z][a-z0-9+.:-]{0,60}:/{1,3})([^/:@?#]*:(?!\d{1,5}[/?#])[^@]*@(?:[^/?#@]*@)*|[^/?#]*@)"
)
_QUOTED_USER = re.compile(
    r"""(?i)((?P<q>["'`])\s*[a-z][a-z0-9+.:-]{0,60}://)((?:\\.|(?!(?P=q))[^/:@?#\\]){0,500}:(?!\d{1,5}[/?#])(?:\\.|(?!(?P=q))[^@\\]){0,500}@"""
    r"""(?:(?:\\.|(?!(?P=q))[^/?#@\\]){0,500}@){0,9}|(?:\\.|(?!(?P=q))[^/?#\\]){0,500}@)""",
    re.S,
)
_ORACLE = re.compile(r"(?i)(jdbc:oracle:\w+:)[^\s@/]+/[^\s@]+@")
_PARAMETER = re.compile(
    r"""(?i)([?&][^=&?\s"']{0,60}(?:signature|token|secret|sig|sas|credential|passw|pwd|key|auth)[^=&?\s"']{0,60}=)[^&\s"']+"""
)
_CONNECTION = re.compile(
    rf"""(?i)((?:passw[\w.-]{{0,40}}|pass[._-]?phrase|pwd|secret|token|signature|(?:{_OF_KEYS})[._-]?(?:access[._-]?)?key)\s?=\s?)"""
    rf"""(?:{_QUOTED.format("q")}|{_BRACED}|[^\s&;,"'<>)]+(?:["'][^\s&;"'<>,)\]}}]+)*)""",
    re.S,
)
_HEADER = re.compile(
    rf"""(?i)((?:authorization|cookie)\\*["']?\s*[:=,]\s*)(?:{_QUOTED.format("q")}|digest\s[^\r\n]*|[^"'\r\n]+)""", re.S
)
_SCHEME = re.compile(
    r"""(?i)\b(bearer\s+["']?)(?!realm|auth|token|scope|error)[\w.~+/=-]+|\b(basic\s+)(?=[a-z]*[A-Z0-9+/=])(?!auth|realm)[A-Za-z0-9+/]{6,}=*"""
    r"|\b(negotiate\s+)[A-Za-z0-9+/]{20,}=*"
)
_ASSIGNED = re.compile(
    rf"""(?i)(?P<name>{_NAME}{_SUFFIX})(?P<sep>\\*["']?\s*(?:=>|->|:=|==?|:|>)\s*|\\*["']\s*,\s*|\s+(?:is\s+|was\s+)?(?=\\*["'])|"""
    r"""\s+(?:is|was|given|provided|used)\s*:\s*|(?:\s+[\w:.-]{1,40}=\\*["'][^"'<>\\]{0,80}\\*["']){1,5}\s*>\s*)"""
    rf"""(?:{_QUOTED.format("q")}|{_BRACED}|\[[^\]]*\]|[\w.]{{0,60}}\([^)]*\)|<!\[CDATA\[[^\]]*|(?<==)<[^<>\n]*>|[|>][+-]?\s*?(?:(?:\n|\\+n)[ \t]+(?:(?!\\+n)[^\n])*)+|"""
    rf"""(?<=[=:])[^\s;=&"'{{][^;=&"'\n]*(?=;)|{_PLAIN.replace("}}", "}")})""",
    re.S,
)
_ENCODED = re.compile(
    rf"(?i)({_NAME}{_SUFFIX}(?:%22|%27)?(?:%20|\+)*%3[ad](?:%20|\+)*(?:%22|%27)?)(?:(?!%2[267])[^\s&;\"'<>])+|"
    r"(%3a%2f%2f)(?:(?!%2f|%40)[^\s&\"'<>]){0,100}%3a(?:(?!%40)[^\s&\"'<>]){0,200}(?=%40)"
)
# A name, and its value in the next field or element, such as `<key>password</key><value>x</value>`.
_PAIR = re.compile(
    rf"""(?i)({_NAME}{_SUFFIX}\\*["']?(?:</\w{{1,30}}>(?:\s|\\+[nrt])*<|\s*,\s*|\s+)\\*["']?value\\*["']?(?:\s*[:=]\s*|>\s*))"""
    rf"""(?:{_QUOTED.format("q")}|[^\s<>"',}}\]]+)""",
    re.S,
)
_PAIR_BEFORE = re.compile(
    rf"""(?i)(\\*["']value\\*["']\s*:\s*){_QUOTED.format("q")}(?=\s*,\s*\\*["'](?:name|key)\\*["']\s*:\s*\\*["'][\w.-]{{0,60}}?{_NAME})""",
    re.S,
)
_CALL = re.compile(r"""(?i)(\b\w{0,40}(?:credentials?|secret\w{0,20}|token|auth|password)\()(?=\\*["'b])[^()]*""")
_FLAG = re.compile(
    rf"""(?i)((?<![\w-])--?[\w-]{{0,60}}?{_NAME}{_SUFFIX}["']*\s+["']*)(?![-=:])[^\s"']+|(\s(?:-u|--user|--proxy-user)[\s=]+["']?[^\s:"']+:)[^\s"']+"""
)
_LOGIN = re.compile(
    r"(?i)(\blogin\s+\S+\s+password\s+)\S+|((?<![\w:/])//[^\s/:@]+:)[^\s/@]+(?=@)|((?<![\w.:-])[\w.-]{1,60}:)[^\s/@]+(?=@(?:tcp|unix)\()"
)
_FORMS = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*|\bgh[pousr]_\w{20,}|\bdapi[0-9a-f]{32}|\bAIza[\w-]{35}|\bxox[a-z]-[\w-]{10,}|"
    r"\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bhf_\w{20,}|\bnpm_\w{30,}|\bsk-[\w-]{20,}|\b[sr]k_(?:live|test)_\w{16,}|\bya29\.[\w-]{10,}|"
    r"\bSG\.[\w-]{16,}\.[\w-]{16,}|\bhv[sb]\.[\w-]{20,}"
)
_MAY_HOLD = re.compile(
    r"(?i)secret|pass|pwd|token|credential|sig|sas|key|auth|cookie|session|connection|bearer|basic|@|akia|asia|eyj|gh[pousr]_|dapi|aiza|xox|"
    r"pw|psk|jwt|assertion|identified|negotiate|-u|github_pat|glpat|hf_|npm_|[sr]k[-_]|ya29|sg\.|hv[sb]\.|%40"
)
_SECRET_OPTION = re.compile(
    rf"(?i)secret|passw|pass[._-]?phrase|pwd|token|credential|signature|(^|[._-])(key|sas|auth|pass)$|(?:{_OF_KEYS})[_-]?key(?!ring)|(?:access|account|api|private|secret|shared)[.]key|connection_string"
)
_OWN_OPTION = re.compile(r"lookup\.[\w.-]*$")


def names_secret(name: str) -> bool:
    """Whether an option with this name has a credential as its value."""
    return _SECRET_OPTION.search(name) is not None


def names_bucket_with_credentials(path: str) -> bool:
    """Whether a URL has a user or a key before the name of its bucket. No store reads credentials there."""
    return _BUCKET_USER.match(path) is not None


def has_unusual_login(url: str) -> bool:
    """Whether a URL has credentials that `without_credentials` does not find in an error that quotes the URL, e.g. because of a space."""
    return _without_parts(url) != _without_parts(_WHOLE_USER.sub(_without_user, url, 1))


def without_url_credentials(text: str) -> str:
    """A path, or the value of another option, without the credentials in its URLs and connection strings."""
    if not _MAY_HOLD.search(text):
        return text
    return _CONNECTION.sub(rf"\1{_HIDDEN}", _without_parts(_WHOLE_USER.sub(_without_user, text, 1)))


def without_credentials(text: str) -> str:
    """The text, of any origin, without its credentials. Harmless text that looks like a credential may be hidden, too."""
    if not _MAY_HOLD.search(text):
        return text
    text = _without_parts(_PEM.sub(_HIDDEN, text))
    for pattern in (_HEADER, _SCHEME, _PAIR, _PAIR_BEFORE, _CALL, _ENCODED):
        text = pattern.sub(_without_last, text)
    text = _ASSIGNED.sub(_without_value, text)
    for pattern in (_FLAG, _LOGIN):
        text = pattern.sub(_without_last, text)
    return _FORMS.sub(_HIDDEN, text)


def _without_parts(url: str) -> str:
    url = _QUOTED_USER.sub(_without_user, url)
    url = _USER.sub(_without_user, _KEY_PAIR.sub(rf"\1{_HIDDEN}@", url))
    return _PARAMETER.sub(rf"\1{_HIDDEN}", _ORACLE.sub(rf"\1{_HIDDEN}@", url))


def _without_user(match: re.Match[str]) -> str:
    scheme, user = match[1], match[match.lastindex or 0]
    # In these URLs, the part before the @ is the name of a container.
    if scheme.lower().rstrip(":/").endswith(("abfs", "abfss", "wasb", "wasbs")) and ":" not in user:
        return match[0]
    return f"{scheme}{_HIDDEN}@"


def _without_last(match: re.Match[str]) -> str:
    """The matched text without the credential at its end. Quotes around the credential stay."""
    quote = match.groupdict().get("q") or ""
    before = match[1] if quote else next(filter(None, match.groups()), "")
    return match[0] if _HIDDEN[:-1] in match[0][len(before) :] else f"{before}{quote}{_HIDDEN}{quote}"


def _without_value(match: re.Match[str]) -> str:
    prefix = match["name"] + match["sep"]
    secret = match[0][len(prefix) :]
    # Our own messages begin with the name of an option, as in `option lookup.storage.token: …`, and what follows is not a secret.
    if _HIDDEN in secret or (match["sep"].startswith(":") and _OWN_OPTION.search(match.string, 0, match.start())):
        return match[0]
    quote = match["q"] or ""
    return f"{prefix}{quote}{_HIDDEN}{quote}"


def list_header_secrets(value: str) -> list[str]:
    """What no error may show of a header with a credential: its value, what follows a scheme such as Bearer, the password in Basic, and the values
    in cookies."""
    value = value.strip()
    scheme, _, rest = value.partition(" ")
    credential = rest.strip() or value
    parts = (part.partition("=")[2].strip('"') for part in re.split(r"[\s;,]+", credential))
    secrets = [value, credential, *(part for part in parts if len(part) >= _SHORTEST_PART)]
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):  # it is not what Basic has
            pair = base64.b64decode(credential).decode()
            secrets += [pair, pair.partition(":")[2]]
    return [secret for secret in secrets if secret]


def redact_server_text(text: str, secrets: Iterable[str]) -> str:
    """What a server says, for an error; a hint instead, if the text has one of the `secrets`, as it is, or as in a URL, in JSON or in HTML."""
    texts = [other.replace("\\", "") for other in (text, unquote(text), unquote_plus(text), html.unescape(text))]
    for secret in secrets:
        spellings = {spelling.replace("\\", "") for spelling in (secret, json.dumps(secret)[1:-1])}
        if any(spelling in other for other in texts for spelling in spellings if spelling):
            return "(the text of the server shows a credential, so it is left out)"
    return text


def find_origin(uri: str) -> tuple[str, str, int] | None:
    """The scheme, host and port of a server's URL; None for any other text, or for a URL with a user."""
    try:
        parts = urlsplit(uri)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    is_server = parts.hostname and port and "@" not in parts.netloc and not re.search(r"\s", uri)
    return (parts.scheme, parts.hostname or "", port or 0) if is_server else None
