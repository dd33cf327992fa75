"""The life of a TPU by name, over real HTTP and google-auth, against a server here that speaks the Cloud TPU API."""

import logging

import pytest
from fake_tpu_api import PARENT, PROJECT, ZONE, FakeTPU

from mesh_transformer.cluster import tpu_api, tpu_nodes
from mesh_transformer.cluster.accelerators import accelerator
from mesh_transformer.cluster.tpu_api import TPUError
from mesh_transformer.errors import ConfigError

pytest.importorskip("google.auth", reason="needs google-auth")


NONCE = "0123456789abcdef"


class Time:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now, self.pauses = 0.0, []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def fake():
    server = FakeTPU()
    yield server
    server.close()


@pytest.fixture
def time_():
    return Time()


@pytest.fixture
def api(fake, tmp_path, monkeypatch, time_):
    for name, value in fake.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(tpu_api.PROJECT_VARIABLE, raising=False)
    found = tpu_api.connect(ZONE, None)
    assert found.project == PROJECT  # the credentials name it
    found.clock, found.sleep = time_.clock, time_.sleep
    return found


def request(**changes):
    kind = accelerator("v4-32")
    return tpu_nodes.Request(kind, kind.runtime, **changes)


@pytest.mark.parametrize(
    "name, generation, devices, hosts, runtime",
    [
        ("v2-8", "v2", 8, 1, "tpu-ubuntu2204-base"),
        ("v3-32", "v3", 32, 4, "tpu-ubuntu2204-base"),
        ("v4-32", "v4", 16, 4, "tpu-ubuntu2204-base"),
        ("v5e-16", "v5e", 16, 4, "v2-alpha-tpuv5-lite"),
        ("v5litepod-8", "v5e", 8, 1, "v2-alpha-tpuv5-lite"),
        ("v5p-128", "v5p", 64, 16, "v2-alpha-tpuv5"),
        ("v6e-16", "v6e", 16, 4, "v2-alpha-tpuv6e"),
        ("tpu7x-16", "tpu7x", None, 4, "v2-alpha-tpu7x"),
        ("v9-64", "v9", None, 16, "v2-alpha-tpuv9"),
    ],
)
def test_accelerator_names(name, generation, devices, hosts, runtime):
    found = accelerator(name)
    assert (found.generation, found.devices, found.usual_hosts, found.runtime) == (generation, devices, hosts, runtime)
    assert found.name == name.replace("v5e", "v5litepod")


@pytest.mark.parametrize("name", ["v3", "v3-0", "v3-7", "h100-8", "v3-8-8", "-8", ""])
def test_other_names_are_refused(name):
    with pytest.raises(ConfigError, match="TPU type"):
        accelerator(name)


def test_a_tpu_is_made_and_waited_for(api, fake):
    node = tpu_nodes.create(api, "pod", request(spot=True, metadata=(("ssh-keys", "me:key"),)), NONCE)
    assert [endpoint.internal for endpoint in tpu_nodes.endpoints(node)] == fake.hosts
    (body,) = [body for method, path, body in fake.log if method == "POST"]
    assert body["acceleratorType"] == "v4-32" and body["runtimeVersion"] == "tpu-ubuntu2204-base"
    assert body["schedulingConfig"] == {"spot": True} and body["metadata"] == {"ssh-keys": "me:key"}
    assert tpu_nodes.request_of(node) == request(spot=True, metadata=(("ssh-keys", "me:key"),))
    assert tpu_nodes.delete(api, "pod") and not fake.nodes
    assert not tpu_nodes.delete(api, "pod")


def test_a_queued_tpu_is_made_waited_for_and_deleted_with_its_request(api, fake, caplog):
    caplog.set_level(logging.INFO, "mesh_transformer")
    node = tpu_nodes.create(api, "pod", request(spot=True, queued=True), NONCE)
    assert node["queuedResource"] == f"{PARENT}/queuedResources/pod"
    assert fake.queued["pod"]["spot"] == {} and "guaranteed" not in fake.queued["pod"]
    assert "the request is WAITING_FOR_RESOURCES" in caplog.text
    assert tpu_nodes.delete(api, "pod")
    assert not fake.nodes and not fake.queued and fake.requests("DELETE") == ["queuedResources/pod"]


@pytest.mark.parametrize(
    "status, word, message, reason, said",
    [
        (403, "PERMISSION_DENIED", "Permission 'tpu.nodes.create' denied", None, "roles/tpu.admin"),
        (403, "PERMISSION_DENIED", "Cloud TPU API has not been used", "SERVICE_DISABLED", "gcloud services enable"),
        (403, "PERMISSION_DENIED", "Quota 'TPUV4PodPerProject' exceeded", None, "no quota left"),
        (429, "RESOURCE_EXHAUSTED", "Quota limit 'TPUV4' has been exceeded. Limit: 0 in zone", None, "no quota left"),
        (429, "RESOURCE_EXHAUSTED", "There is no more capacity in the zone", None, "no such TPU free now"),
        (400, "INVALID_ARGUMENT", "Invalid value for field", None, "Invalid value for field"),
        (404, "NOT_FOUND", "Location was not found", None, f"the zone {ZONE}"),
        (409, "ALREADY_EXISTS", "it exists", None, "that name is in use"),
    ],
)
def test_a_refused_creation_is_an_error_that_says_what_to_do(api, fake, time_, status, word, message, reason, said):
    fake.refuse = [("POST", status, word, message, reason)]
    with pytest.raises(TPUError, match=said) as error:
        tpu_nodes.create(api, "pod", request(), NONCE)
    assert error.value.status == status and message in str(error.value)
    assert len(fake.requests("POST")) == 1 and not fake.nodes and not time_.pauses


def test_what_may_pass_is_asked_again_with_growing_pauses(api, fake, time_):
    rate = "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute'"
    fake.refuse = [
        ("*", 429, "RESOURCE_EXHAUSTED", rate, "RATE_LIMIT_EXCEEDED", {"Retry-After": "7"}),
        ("*", 503, "UNAVAILABLE", "down"),
        ("*", 500, "INTERNAL", "oops"),
        ("*", 0, "", ""),
    ]
    assert api.get("nodes/none") is None
    first, *rest = time_.pauses
    assert first == 7 and len(rest) == 3 and rest == sorted(rest)


def test_asking_again_has_an_end(api, fake, time_):
    fake.refuse = [("GET", 503, "UNAVAILABLE", "down")] * 100
    with pytest.raises(TPUError, match="503 UNAVAILABLE: down; the service has trouble"):
        api.get("nodes/pod")
    assert time_.now <= tpu_api.CALL_SECONDS and 5 < len(fake.log) < 15


def test_an_answer_that_is_lost_does_not_make_a_second_one(api, fake):
    fake.refuse = [("POST", 0, "", "", "and yet it is made")]
    tpu_nodes.create(api, "pod", request(), NONCE)
    assert len(fake.nodes) == 1 and len(fake.requests("POST")) == 2


def test_anothers_of_the_same_name_is_not_taken(api, fake):
    fake.create_node("pod", {"acceleratorType": "v4-32", "runtimeVersion": "x"})
    with pytest.raises(TPUError, match="409 ALREADY_EXISTS"):
        tpu_nodes.create(api, "pod", request(), NONCE)


def test_an_operation_that_fails_is_an_error(api, fake):
    stock = {"code": 8, "message": "There is no more capacity in the zone"}
    fake.operation = lambda **more: (200, {"name": f"{PARENT}/operations/x", "done": True, "error": stock})
    with pytest.raises(TPUError, match=f"making TPU pod.*RESOURCE_EXHAUSTED.*{ZONE} has no such TPU free now") as error:
        tpu_nodes.create(api, "pod", request(), NONCE)
    assert error.value.may_pass


@pytest.mark.parametrize("what", ["operation", "node", "queue"])
def test_nothing_waits_for_ever(api, fake, time_, what):
    fake.ready_after = fake.queue_after = 10**9
    if what == "operation":
        fake.advance = lambda kind, found: None
    with pytest.raises(TPUError, match="after 600 s"):
        tpu_nodes.create(api, "pod", request(queued=what == "queue"), NONCE, seconds=600)
    assert 600 < time_.now < 1300 and len(fake.log) < 150


def test_a_failed_request_in_the_queue_says_why(api, fake):
    fake.advance = lambda kind, found: found.update(done=True, state={
        "state": "FAILED", "failedData": {"error": {"message": "no such reservation"}}})  # fmt: skip
    with pytest.raises(TPUError, match="is FAILED: no such reservation"):
        tpu_nodes.create(api, "pod", request(queued=True), NONCE)


@pytest.mark.parametrize("queued", [False, True])
def test_a_preempted_tpu_is_deleted_and_made_again_when_there_is_capacity(api, fake, time_, queued):
    node = tpu_nodes.create(api, "pod", request(spot=True, queued=queued), NONCE)
    fake.preempt("pod")
    with pytest.raises(TPUError, match="PREEMPTED"):
        tpu_nodes.await_ready(api, "pod")
    fake.refuse = [("POST", 429, "RESOURCE_EXHAUSTED", "There is no more capacity in the zone")] * 4
    again = tpu_nodes.recreate(api, "pod", tpu_nodes.request_of(node), NONCE)
    assert again["state"] == "READY" and again["id"] != node["id"]
    assert again["acceleratorType"] == "v4-32" and again["labels"] == {"mesh-transformer": NONCE}
    assert len(fake.requests("DELETE")) == 1 and len(fake.requests("POST")) == 6
    waits = [pause for pause in time_.pauses if pause > 15]
    assert waits == sorted(waits) and waits  # between tries, longer each time


def test_making_again_stops_at_what_waiting_does_not_help(api, fake, time_):
    tpu_nodes.create(api, "pod", request(), NONCE)
    before = len(fake.requests("POST"))
    fake.refuse = [("POST", 403, "PERMISSION_DENIED", "denied")]
    with pytest.raises(TPUError, match="roles/tpu.admin"):
        tpu_nodes.recreate(api, "pod", request(), NONCE)
    assert len(fake.requests("POST")) == before + 1
    fake.refuse = [("POST", 429, "RESOURCE_EXHAUSTED", "no more capacity")] * 1000
    with pytest.raises(TPUError, match="no such TPU free now"):
        tpu_nodes.recreate(api, "pod", request(), NONCE, seconds=3600)
    assert time_.now < 2 * 3600


def test_types_and_images_that_a_zone_lacks_are_refused_before_anything_is_asked_for(api, fake):
    tpu_nodes.check_offered(api, request())
    missing = accelerator("v4-4096")
    with pytest.raises(ConfigError, match="--tpu_type v4-4096.*it offers v2-8, v3-8, v4-16, v4-32, v4-8, v5litepod-16"):
        tpu_nodes.check_offered(api, tpu_nodes.Request(missing, missing.runtime))
    with pytest.raises(ConfigError, match="--runtime-version nope.*v2-alpha-tpuv5-lite"):
        tpu_nodes.check_offered(api, tpu_nodes.Request(accelerator("v4-32"), "nope"))
    assert not fake.requests("POST")


def test_the_token_is_renewed(api, fake, time_):
    """T21: before it runs out, and when the API calls it invalid."""
    assert api.get("nodes/pod") is None and len(fake.tokens) == 1
    assert api.get("nodes/pod") is None and len(fake.tokens) == 1
    fake.tokens = dict.fromkeys(fake.tokens, 0.0)  # revoked
    assert api.get("nodes/pod") is None and len(fake.tokens) == 2
    fake.token_seconds = 1  # google-auth renews what has less than minutes to live
    fake.tokens = dict.fromkeys(fake.tokens, 0.0)
    for _ in range(3):
        before = len(fake.tokens)
        assert api.get("nodes/pod") is None and len(fake.tokens) > before


def test_no_token_is_ever_shown(api, fake, caplog):
    caplog.set_level(logging.DEBUG)
    fake.refuse = [("GET", 503, "UNAVAILABLE", "down"), ("GET", 403, "PERMISSION_DENIED", "denied")]
    with pytest.raises(TPUError) as error:
        api.get("nodes/pod")
    assert fake.tokens and not [token for token in fake.tokens if token in caplog.text + str(error.value)]


def test_bad_credentials_are_said(api, fake):
    fake.answer = lambda method, path, content, headers: (
        (400, {"error": "invalid_grant", "error_description": "account deleted"}, {}) if path == "/token" else 1 / 0
    )
    with pytest.raises(TPUError, match="gcloud auth application-default login"):
        api.get("nodes/pod")


def test_without_credentials_the_remedy_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(TPUError, match="gcloud auth application-default login"):
        tpu_api.connect(ZONE, None)


def test_tokens_are_not_sent_in_the_clear(monkeypatch):
    monkeypatch.setenv(tpu_api.ENDPOINT_VARIABLE, "http://tpu.example.com")
    with pytest.raises(ConfigError, match="must be https"):
        tpu_api.connect(ZONE, None)


def test_host_keys_come_from_the_api(api, fake):
    tpu_nodes.create(api, "pod", request(), NONCE)
    fake.host_keys = [["ssh-ed25519 AAAA0"], ["ssh-ed25519 AAAA1", "ecdsa-sha2-nistp256 BBBB"]]
    assert tpu_nodes.host_keys(api, "pod", 2) == fake.host_keys
    fake.refuse = [("POST", 404, "NOT_FOUND", "no guest attributes")] * 2
    assert tpu_nodes.host_keys(api, "pod", 2) == [[], []]


@pytest.mark.parametrize("name", ["Pod", "1pod", "pod_1", "p" * 64, "pod-", ""])
def test_names_that_the_api_would_refuse(name):
    with pytest.raises(ConfigError, match="TPU name"):
        tpu_nodes.check_name(name)
    tpu_nodes.check_name("pod-1")
