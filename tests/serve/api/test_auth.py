"""Tests of API keys: authentication, key files that change or are invalid, and the command that makes keys."""

import contextlib
import dataclasses
import io
import os
import pathlib

import pytest

from jaxinfer.serve import keys
from jaxinfer.serve.api import auth
from jaxinfer.serve.api.auth import SCOPES, Authoriser, KeysError, key_entry, new_key, read_keys
from jaxinfer.serve.api.errors import Kind, ServeError

ALICE, BOB = "jaxinfer-alice", "jaxinfer-bob"


@dataclasses.dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "keys.yaml"
    path.write_text(key_entry(ALICE, "alice", ["infer", "observe"]) + key_entry(BOB, "bob", ["admin"]))
    return path


def refusal(authoriser: Authoriser, token: str | None, scope: str = "infer") -> Kind:
    with pytest.raises(ServeError) as caught:
        authoriser.authorise(token, scope)
    assert ALICE not in caught.value.message
    return caught.value.kind


def test_a_key_opens_its_scopes_and_no_others(file):
    authoriser = Authoriser(file)
    assert authoriser.authorise(ALICE, "infer").name == "alice"
    assert authoriser.authorise(BOB, "admin").name == "bob"
    assert refusal(authoriser, ALICE, "admin") is Kind.FORBIDDEN
    assert refusal(authoriser, BOB, "infer") is Kind.FORBIDDEN


@pytest.mark.parametrize("token", [None, "", ALICE + "x", ALICE[:-1], "x" * 10**6, "\ud800", ALICE.upper(), "ключ"])
def test_other_keys_open_nothing(file, token):
    assert refusal(Authoriser(file), token) is Kind.UNAUTHENTICATED


def test_the_hash_is_no_key(file):
    digest = str(file.read_text()).split("sha256: ")[1].split()[0]
    assert refusal(Authoriser(file), digest) is Kind.UNAUTHENTICATED
    assert ALICE not in file.read_text()


def test_without_a_file_everybody_may_do_everything():
    caller = Authoriser(None).authorise(None, "admin")
    assert (caller.name, caller.scopes) == ("", frozenset(SCOPES))


def test_an_empty_file_lets_nobody_in(tmp_path):
    (tmp_path / "none.yaml").write_text("")
    assert refusal(Authoriser(tmp_path / "none.yaml"), ALICE) is Kind.UNAUTHENTICATED


@pytest.mark.parametrize("token", [ALICE, BOB, "nobody"])
def test_every_key_is_compared_whichever_fits(file, token, monkeypatch):
    compared = []
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append(a) or a == b)
    authoriser = Authoriser(file)
    with contextlib.suppress(ServeError):
        authoriser.authorise(token, "infer")
    assert len(compared) == 2


def test_a_changed_file_is_read_again_within_a_second(file):
    clock = Clock()
    authoriser = Authoriser(file, clock=clock)
    file.write_text(key_entry(BOB, "bob", ["infer"]))
    assert authoriser.authorise(ALICE, "infer").name == "alice"
    clock.now = 1.0
    assert refusal(authoriser, ALICE) is Kind.UNAUTHENTICATED
    assert authoriser.authorise(BOB, "infer").name == "bob"


def test_a_file_that_is_replaced_is_read_again(file, tmp_path):
    clock = Clock()
    authoriser = Authoriser(file, clock=clock)
    other = tmp_path / "other.yaml"
    other.write_text(file.read_text().replace("alice", "carol"))
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)
    clock.now = 1.0
    assert authoriser.authorise(ALICE, "infer").name == "carol"


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text("- nonsense"),
        lambda path: path.write_text("- 2026-13-45"),
        lambda path: path.write_text(""),  # as if it were being written
        lambda path: path.unlink(),
    ],
)
def test_bad_changes_leave_the_keys_as_they_were(file, change, caplog):
    clock = Clock()
    authoriser = Authoriser(file, clock=clock)
    change(file)
    clock.now = 1.0
    assert authoriser.authorise(ALICE, "infer").name == "alice"
    assert "stay in use" in caplog.text
    file.write_text(key_entry(BOB, "bob", ["infer"]))
    clock.now = 2.0
    assert refusal(authoriser, ALICE) is Kind.UNAUTHENTICATED


def test_an_empty_list_takes_all_keys_away(file):
    clock = Clock()
    authoriser = Authoriser(file, clock=clock)
    file.write_text("[]\n")
    clock.now = 1.0
    assert refusal(authoriser, ALICE) is Kind.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot read"),
        ("- 2026-13-45", "cannot read"),
        ("name: alice", "a list"),
        ("- {name: a}", "the fields name, scopes, sha256, and may have cache_group, weight"),
        ("- {name: a, sha256: 12, scopes: [infer]}", "sha256"),
        (f"- {{name: a, sha256: {'A' * 64}, scopes: [infer]}}", "sha256"),
        (f"- {{name: a, sha256: {'a' * 64}, scopes: [root]}}", "scopes"),
        (f"- {{name: a, sha256: {'a' * 64}, scopes: infer}}", "scopes"),
        (f"- {{name: a, sha256: {'a' * 64}, scopes: []}}", "scopes"),
        (f"- {{name: '', sha256: {'a' * 64}, scopes: [infer]}}", "name"),
        (f"- {{name: a, sha256: {'a' * 64}, scopes: [infer], expires: 1}}", "the fields"),
        (f"- {{name: a, sha256: {'a' * 64}, scopes: [infer], cache_group: ''}}", "cache_group=''"),
        (f"- {{name: a, sha256: {'a' * 64}, scopes: [infer], cache_group: [b]}}", "cache_group"),
        (f"- {{name: a, sha256: {'a' * 64}, scopes: [infer], weight: 0}}", "weight=0 must be from 0.01 to 100"),
        (f"- {{name: a, sha256: {'a' * 64}, scopes: [infer], weight: .inf}}", "weight=inf must be"),
        (f"- {{name: a, sha256: {'a' * 64}, scopes: [infer], weight: true}}", "weight=True must be"),
        ("- !!python/object/apply:os.getcwd []", "cannot read"),
        ("[" * 4000, "cannot read"),
        ("- a\n" * 1001, "at most 1000"),
        ("#" * (1 << 20) + "\n", "bytes"),
    ],
)
def test_bad_files_are_refused_in_a_sentence(tmp_path, text, says):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(KeysError, match=says) as caught:
        Authoriser(path)
    assert "\n" not in str(caught.value)


def test_keys_may_be_in_a_group_and_the_file_may_change_it(tmp_path):
    path, clock = tmp_path / "keys.yaml", Clock()
    path.write_text(key_entry(ALICE, "alice", ["infer"], "team") + key_entry(BOB, "bob", ["infer"]))
    authoriser = Authoriser(path, clock=clock)
    assert [authoriser.cache_group(name) for name in ("alice", "bob", "nobody")] == ["team", None, None]
    assert authoriser.authorise(ALICE, "infer").cache_group == "team"
    path.write_text(key_entry(ALICE, "alice", ["infer"]) + key_entry(BOB, "bob", ["infer"], "other"))
    clock.now = 1.0
    authoriser.authorise(ALICE, "infer")
    assert [authoriser.cache_group(name) for name in ("alice", "bob")] == [None, "other"]


@pytest.mark.parametrize("other", ["another", None])
def test_keys_of_one_name_are_in_one_group(tmp_path, other):
    path = tmp_path / "keys.yaml"
    path.write_text(key_entry(ALICE, "alice", ["infer"], "team") + key_entry(BOB, "alice", ["infer"], other))
    with pytest.raises(KeysError, match=f"'alice' have cache_group='team' and cache_group={other!r}"):
        Authoriser(path)
    path.write_text(key_entry(ALICE, "alice", ["infer"], "team") + key_entry(BOB, "alice", ["observe"], "team"))
    assert Authoriser(path).cache_group("alice") == "team"


def test_keys_have_weights_and_the_file_may_change_them(tmp_path):
    path, clock = tmp_path / "keys.yaml", Clock()
    path.write_text(key_entry(ALICE, "alice", ["infer"], weight=2.5) + key_entry(BOB, "bob", ["infer"]))
    authoriser = Authoriser(path, clock=clock)
    assert [authoriser.weight(name) for name in ("alice", "bob", "nobody")] == [2.5, 1.0, 1.0]
    path.write_text(key_entry(ALICE, "alice", ["infer"]) + key_entry(BOB, "alice", ["observe"], weight=3.0))
    clock.now = 1.0
    authoriser.authorise(ALICE, "infer")
    assert authoriser.weight("alice") == 2.5, "keys of one name with two weights change nothing"
    with pytest.raises(KeysError, match=r"'alice' have weight=1\.0 and weight=3\.0"):
        Authoriser(path)


def test_without_keys_a_certificate_names_the_caller(file):
    nobody, certificate = Authoriser(None), bytes.fromhex("3006300430003000")
    with pytest.raises(ValueError, match="no certificate"):
        nobody.authorise(None, "infer", lambda: certificate)
    with_keys = Authoriser(file)
    assert with_keys.authorise(ALICE, "infer", lambda: certificate).name == "alice", "a key says more"


def test_no_file_is_refused(tmp_path):
    with pytest.raises(KeysError, match=r"absent\.yaml"):
        Authoriser(tmp_path / "absent.yaml")


def test_the_door_makes_keys_that_open(tmp_path, capsys):
    path = tmp_path / "keys.yaml"
    made = []
    for name, scopes in (("alice", "infer,observe"), ("Zoë: '#1'", "admin")):
        assert keys.main(["new", name, "--scopes", scopes]) == 0
        out, err = capsys.readouterr()
        with path.open("a") as file:
            file.write(out)
        assert err.strip() not in out
        made.append(err.strip())
    authoriser = Authoriser(path)
    assert authoriser.authorise(made[0], "observe").name == "alice"
    assert authoriser.authorise(made[1], "admin").name == "Zoë: '#1'"
    assert len(read_keys(path)) == 2
    for token in (made[0] + "x", made[0][:-1]):
        assert refusal(authoriser, token) is Kind.UNAUTHENTICATED


def test_a_key_may_only_infer_unless_asked_for_more(tmp_path, capsys):
    assert keys.main(["new", "carol"]) == 0
    path = tmp_path / "keys.yaml"
    path.write_text(capsys.readouterr().out)
    (key,) = read_keys(path)
    assert key.caller.scopes == {"infer"}


def test_the_door_puts_a_key_into_a_group(tmp_path, capsys):
    assert keys.main(["new", "carol", "--cache-group", "team"]) == 0
    path = tmp_path / "keys.yaml"
    path.write_text(capsys.readouterr().out)
    assert Authoriser(path).cache_group("carol") == "team"


def test_the_door_refuses_unknown_scopes(capsys):
    assert keys.main(["new", "alice", "--scopes", "root"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "root" in err


def test_the_door_hashes_a_key_of_somebody_elses(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 32 + "\n"))
    assert keys.main(["hash", "carol"]) == 0
    out, err = capsys.readouterr()
    assert not err
    path = tmp_path / "keys.yaml"
    path.write_text(out)
    assert Authoriser(path).authorise("x" * 32, "infer").name == "carol"


def test_the_door_hashes_no_key_that_can_be_guessed(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("secret\n"))
    assert keys.main(["hash", "carol"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "a key of 6 characters can be guessed" in err


def test_keys_differ():
    assert len({new_key() for _ in range(100)}) == 100
