"""What requests and answers look like; what a field may hold is said here once, and /openapi.json repeats it.

Numbers are numbers (not strings or booleans), NaN and infinities are none, and fields that nobody knows are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Temperature = Annotated[float, Field(ge=0, le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Probability = Annotated[float, Field(ge=0, le=1)]
MOST_STOPS, MOST_STOP_LENGTH = 4, 256
MOST_LOGPROBS = 5
MOST_BIAS = 32
_SEED_LIMIT = 2**63


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _whole(text: str) -> str:
    """JSON can say half a surrogate pair, but it is no character and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start}") from error
    return text


Text = Annotated[str, AfterValidator(_whole)]


def _stops(value: Any) -> list[str] | None:
    """One stop string or several, as a list."""
    if value is None:
        return None
    found = [value] if isinstance(value, str) else value
    whole = isinstance(found, list) and all(isinstance(x, str) and 0 < len(x) <= MOST_STOP_LENGTH for x in found)
    if not whole or len(found) > MOST_STOPS:
        raise ValueError(f"expected a string of 1 to {MOST_STOP_LENGTH} characters, or up to {MOST_STOPS} of them")
    return list(map(_whole, found))


_STOP_SCHEMA: Any = {"type": "string", "minLength": 1, "maxLength": MOST_STOP_LENGTH}
Stop = Annotated[
    list[str] | None,
    BeforeValidator(_stops, json_schema_input_type=Any),
    Field(
        default=None,
        json_schema_extra={"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "maxItems": MOST_STOPS},
                                     {"type": "null"}]},
        description="texts that end the completion, and are not part of it",
    ),
]  # fmt: skip
Seed = Annotated[int | None, Field(default=None, ge=-_SEED_LIMIT, lt=_SEED_LIMIT)]


class CompleteRequest(_Request):
    """`POST /complete`, the 2021 library's; `max_tokens`, `top_k`, `seed` and `stop` are new."""

    context: Text = Field(description="the text to go on with; of a long one the model reads the end")
    top_p: Probability = Field(0.9, description="nucleus; 1 is off, 0 is greedy")
    temp: float = Field(0.75, ge=0, le=1e6, description="temperature; 0 is greedy")
    top_k: int | None = Field(None, ge=1, description="draw from the k most probable tokens only")
    max_tokens: int | None = Field(
        None, ge=1, description="most new tokens; 256, or the server's limit if that is less"
    )
    seed: Seed
    stop: Stop


class CompleteAnswer(BaseModel):
    """Its success body."""

    completion: str


def _prompt(value: Any) -> Any:
    """A text, token ids, or a list of either: told apart here, so that a mistake is said in one line."""
    if value is None or isinstance(value, str) or (isinstance(value, list) and (_ids(value) or _many(value))):
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                _whole(text)
        return value
    raise ValueError("expected a string, a list of token ids, or a list (not empty) of strings or of lists of ids")


def _ids(value: Any) -> bool:
    whole = isinstance(value, list) and value
    return bool(whole and all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**31 for x in value))


def _many(value: list[Any]) -> bool:
    return bool(value) and (all(isinstance(x, str) for x in value) or all(_ids(x) for x in value))


_IDS_SCHEMA: Any = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1}


class StreamOptions(_Request):
    """Options of `stream`."""

    include_usage: bool | None = Field(None, description="a last chunk tells the tokens used")
    include_obfuscation: bool | None = Field(None, description="taken and ignored")


class CompletionRequest(_Request):
    """`POST /v1/completions` of the OpenAI API; `top_k`, `min_p` and `repetition_penalty` are this server's own."""

    model: Text | None = Field(None, description="as GET /v1/models names it; may be left out")
    prompt: Annotated[Any, BeforeValidator(_prompt)] = Field(
        None,
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1},
                                     _IDS_SCHEMA, {"type": "array", "items": _IDS_SCHEMA, "minItems": 1},
                                     {"type": "null"}]},
        description="a text, token ids, or several of either; none is the empty text",
    )  # fmt: skip
    max_tokens: int | None = Field(16, ge=1, description="most new tokens of a completion")
    temperature: Temperature | None = Field(1.0, description="0 is greedy")
    top_p: Probability | None = Field(1.0, description="nucleus; 1 is off")
    top_k: int | None = Field(None, ge=1, description="draw from the k most probable tokens only")
    min_p: Probability | None = Field(None, description="least probability, as a share of the most probable token's")
    n: int | None = Field(1, ge=1, description="completions of each prompt")
    best_of: int | None = Field(None, ge=1, description="taken only where it equals n")
    seed: Seed
    stop: Stop
    stream: bool | None = Field(False, description="answer as server-sent events")
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(
        None, ge=0, le=MOST_LOGPROBS, description="how many alternatives to tell of each token"
    )
    echo: bool | None = Field(False, description="put the prompt in front of the completion")
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="above 1 lowers tokens that are there already"
    )
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = Field(None, max_length=MOST_BIAS, description="added to the logits of these token ids")
    suffix: None = Field(None, description="not supported: must be null")
    user: Text | None = Field(None, description="taken and ignored")


class Logprobs(BaseModel):
    """Of each token: its text, log-probability, the likeliest alternatives, and where it begins in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(BaseModel):
    text: str
    index: int
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionAnswer(BaseModel):
    """A `text_completion` of the OpenAI API; a stream's chunks have the same form."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    """`status`: loading, ready, draining, stalled or failed; only `ready` has the HTTP status 200."""

    status: Literal["loading", "ready", "draining", "stalled", "failed"]
    model: str
    running: int
    waiting: int
