"""Others prepare names in folders that they can write too: what they own stays, and so does what they point to."""

import contextlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.users_helpers import OTHER, PLANTED, TEAM, VICTIM, content, make_home, needs_root, plant, public_folder, user
from zaya_jax.errors import InputError, exit_message
from zaya_jax.run import writing
from zaya_jax.run.files import locked, write_atomically
from zaya_jax.run.metrics import DiskGuard, JsonlFile


def _append(path: Path) -> None:
    with open(writing.open_file(path, os.O_RDWR | os.O_APPEND), "a") as file:
        file.write("new")


def _rows(path: Path) -> None:
    rows = JsonlFile(path, 0, 0, DiskGuard(lambda text: None))
    rows.append({"step": 1})
    rows.close()


def _private(path: Path) -> None:
    with writing.private_folder(path) as folder:
        (folder / "1").write_text("new")


def _new_folder(path: Path) -> None:
    with writing.new_folder(path.with_name("final"), path):
        write_atomically(path / "1", "new")


def _lock(path: Path) -> None:
    with locked(path, wait=False):
        pass


def _below(path: Path) -> None:
    writing.make_folder(path / "deep")
    write_atomically(path / "deep" / "1", "new")


@pytest.fixture
def public() -> Iterator[Path]:
    with public_folder() as folder:
        yield folder


# What the product does at a name that can be foretold.
ACTIONS: dict[str, Callable[[Path], object]] = {
    "replace": lambda path: write_atomically(path, "new"),
    "append": _append,
    "rows": _rows,
    "lock": _lock,
    "remove": writing.remove,
    "rename": lambda path: writing.rename(path, path.with_name("gone")),
    "private folder": _private,
    "new folder": _new_folder,
    "folder below": _below,
    "remove below": lambda path: writing.remove(path / "1"),
}


@needs_root
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("planted", PLANTED)
def test_what_others_put_at_a_name_harms_nothing_of_this_user(planted, action):
    for mode in (0o1777, 0o777, 0o2775):
        with public_folder() as base:
            home, place = base / "home", base / "place"
            make_home(home)
            place.mkdir()
            os.chown(place, 0, TEAM)
            place.chmod(mode)
            plant(planted, place / "name", home)
            before = content(home)
            refusal = _try(action, place / "name")
            assert content(home) == before
            assert refusal is None or str(place) in refusal


def _try(action: str, path: Path) -> str | None:
    """Do something as the victim; return the sentence that ends it."""
    with user(VICTIM):
        try:
            ACTIONS[action](path)
        except (OSError, InputError) as error:
            return exit_message(error)[0]
    return None


@needs_root
@pytest.mark.parametrize("action", ["append", "rows", "lock", "private folder"])
@pytest.mark.parametrize("planted", ["link to a file", "hard link", "pipe", "folder"])
def test_a_refusal_says_what_is_there_who_owns_it_and_what_to_do(tmp_path, planted, action):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "1").write_text("all of it")
    path = tmp_path / "name"
    PLANTED[planted](path, tmp_path)
    os.chown(path, OTHER, OTHER, follow_symlinks=False)
    messages = []
    try:
        if action == "rows" and planted != "folder":
            JsonlFile(path, 0, 0, DiskGuard(messages.append)).close()
        else:
            ACTIONS[action](path)
    except (OSError, ValueError) as error:
        messages.append(str(error))
    if action == "rows" and planted == "pipe":
        assert "it is a pipe or a device" in messages[0]
    elif action == "rows" and planted == "folder":
        assert "Is a directory" in messages[0]
    else:
        assert re.search(
            rf"{path} belongs to user {OTHER} \(\S{{10}}, .* must be a .* of yours.* Remove it", messages[0]
        )
    assert (tmp_path / "thesis" / "1").read_text() == "all of it"


@needs_root
@pytest.mark.parametrize(("owner", "mode", "followed"), [
    (VICTIM, 0o777, True), (0, 0o1777, True), (OTHER, 0o755, True), (OTHER, 0o775, False), (OTHER, 0o1777, False),
    (OTHER, 0o777, False),
])  # fmt: skip
def test_a_link_in_a_path_is_followed_if_no_other_user_can_have_planted_it(public, owner, mode, followed):
    """A user's own link to scratch works anywhere, and so does an administrator's."""
    place, target = public / "place", public / "scratch"
    place.mkdir()
    target.mkdir()
    os.chown(target, VICTIM, VICTIM)
    (place / "run").symlink_to("../scratch")
    os.chown(place / "run", owner, owner, follow_symlinks=False)
    os.chown(place, OTHER, TEAM)
    place.chmod(mode)
    with user(VICTIM):
        words = rf"belongs to user {OTHER} .*Name {place}/\.\./scratch itself if you trust it, or choose another"
        refused = contextlib.nullcontext() if followed else pytest.raises(PermissionError, match=words)
        with refused:
            writing.make_folder(place / "run" / "a")
            write_atomically(place / "run" / "a" / "b", "text")
        with refused:
            assert writing.resolved(place / "run" / "a") == target / "a"
    assert (target / "a" / "b").exists() == followed


def test_the_target_of_a_link_is_not_created(tmp_path):
    """It may be on a file system that is not mounted."""
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        writing.make_folder(tmp_path / "link" / "a")
    assert not (tmp_path / "gone").exists()


@needs_root
@pytest.mark.parametrize(("owner", "place_owner", "mode", "accepted"), [
    (VICTIM, OTHER, 0o777, True), (0, OTHER, 0o1777, True), (OTHER, VICTIM, 0o777, False), (OTHER, OTHER, 0o777, False),
    (OTHER, VICTIM, 0o2775, True), (OTHER, OTHER, 0o755, True), (OTHER, VICTIM, 0o755, False),
])  # fmt: skip
def test_a_file_is_continued_if_only_its_user_or_the_team_could_put_it_there(
    public, owner, place_owner, mode, accepted
):
    (public / "place").mkdir()
    os.chown(public / "place", place_owner, TEAM)
    (public / "place").chmod(mode)
    path = public / "place" / "name"
    path.write_text("old ")
    path.chmod(0o666)
    os.chown(path, owner, owner)
    refused = contextlib.nullcontext() if accepted else pytest.raises(PermissionError, match=f"{path} belongs to user")
    with user(VICTIM), refused:
        _append(path)
    assert path.read_text() == ("old new" if accepted else "old ")


@needs_root
@pytest.mark.parametrize(("owner", "mode", "accepted"), [
    (VICTIM, 0o700, True), (VICTIM, 0o755, True), (VICTIM, 0o775, False), (VICTIM, 0o707, False), (OTHER, 0o755, False),
    (OTHER, 0o777, False), (0, 0o755, False),
])  # fmt: skip
def test_a_private_folder_is_one_that_nobody_else_may_write(public, owner, mode, accepted):
    (public / "own").mkdir()
    os.chown(public / "own", owner, owner)
    (public / "own").chmod(mode)
    refused = (
        contextlib.nullcontext() if accepted else pytest.raises(PermissionError, match="must be a folder of yours")
    )
    with user(VICTIM), refused:
        _private(public / "own")
    assert (public / "own" / "1").exists() == accepted


def test_a_new_private_folder_may_be_entered_by_its_owner_alone(tmp_path):
    _private(tmp_path / "a" / "own")
    assert stat.S_IMODE((tmp_path / "a" / "own").stat().st_mode) == 0o700


def test_a_folder_that_is_replaced_while_it_is_used_leaves_its_successor_alone(tmp_path):
    (tmp_path / "thesis" / "100").mkdir(parents=True)
    with writing.private_folder(tmp_path / "own") as folder:
        (tmp_path / "own").rename(tmp_path / "moved")
        (tmp_path / "own").symlink_to(tmp_path / "thesis")
        write_atomically(folder / "1", "new")
        writing.remove(folder / "100")
        with writing.new_file(folder / "2") as file:
            file.write(b"new")
    assert sorted(path.name for path in (tmp_path / "moved").iterdir()) == ["1", "2"]
    assert (tmp_path / "thesis" / "100").is_dir()


@needs_root
def test_links_that_change_all_the_time_never_lead_out_of_the_folder(tmp_path):
    """Somebody swaps a folder for a link of another user's, back and forth, while this process writes and deletes."""
    thesis, place = tmp_path / "thesis", tmp_path / "place"
    for folder in (thesis, place / "steps"):
        folder.mkdir(parents=True)
    (thesis / "100").write_text("all of it")
    place.chmod(0o777)
    (place / "link").symlink_to(thesis)
    os.chown(place / "link", OTHER, OTHER, follow_symlinks=False)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            for source, target in (("steps", "aside"), ("link", "steps"), ("steps", "link"), ("aside", "steps")):
                os.rename(place / source, place / target)

    thread = threading.Thread(target=swap)
    thread.start()
    succeeded = 0
    try:
        for _ in range(400):
            with contextlib.suppress(OSError):
                write_atomically(place / "steps" / "100", "new")
                succeeded += 1
            with contextlib.suppress(OSError):
                writing.remove(place / "steps" / "100")
            with contextlib.suppress(OSError):
                _append(place / "steps" / "100")
    finally:
        done.set()
        thread.join()
    assert [path.name for path in thesis.iterdir()] == ["100"]
    assert (thesis / "100").read_text() == "all of it"


@pytest.mark.parametrize(("mask", "mode", "allowed"), [(0o022, 0o666, 0o644), (0o002, 0o666, 0o664), (0, 0o600, 0o600)])
def test_a_new_file_has_the_permissions_that_the_umask_leaves(tmp_path, mask, mode, allowed):
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "a", "text", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == allowed


def test_names_of_unfinished_files_cannot_be_foretold(tmp_path):
    names = set()
    for _ in range(3):
        with writing.new_file(tmp_path / ("☃" * 80)) as file:
            file.write(b"text")
            names |= set(map(str, os.listdir(tmp_path))) - {"☃" * 80}
    assert len(names) == 3
    assert all(writing.PARTIAL.fullmatch(name) for name in names)


def test_a_name_that_was_foretold_all_the_same_is_not_written_through(tmp_path, monkeypatch):
    (tmp_path / "thesis").write_text("all of it")
    monkeypatch.setattr(writing.secrets, "token_hex", lambda size: "0" * 16)
    (tmp_path / f"a.{'0' * 16}.partial").symlink_to("thesis")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "a", "new")
    assert (tmp_path / "thesis").read_text() == "all of it"


def test_a_new_file_is_removed_after_an_error_and_leaves_the_old_one(tmp_path):
    write_atomically(tmp_path / "a", "old")
    with pytest.raises(ValueError, match="closed file"), writing.new_file(tmp_path / "a") as file:
        file.close()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@needs_root
def test_what_another_user_prepared_is_not_taken_for_ones_own_work(tmp_path):
    """As a corpus in `data.cache_dir`, whose name can be foretold."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)
    for owner, taken in ((os.geteuid(), True), (OTHER, False)):
        path = tmp_path / "cache" / str(owner)
        path.mkdir()
        os.chown(path, owner, owner)
        with contextlib.nullcontext() if taken else pytest.raises(PermissionError, match=f"belongs to user {OTHER}"):
            writing.require_trusted(path)


def test_what_a_library_writes_is_hidden_until_it_is_whole(tmp_path):
    with writing.new_folder(tmp_path / "whole", tmp_path / "part"):
        assert (tmp_path / "part").stat().st_mode & 0o777 == 0o700
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_system_without_chmod_costs_the_sharing_and_not_the_folder(tmp_path, monkeypatch):
    def chmod(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", chmod)
    with writing.new_folder(tmp_path / "whole", tmp_path / "part"):
        write_atomically(tmp_path / "part" / "1", "new")
    assert (tmp_path / "whole" / "1").read_text() == "new"


def test_a_folder_is_shared_where_proc_does_not_tell_the_umask(tmp_path, monkeypatch):
    """As in gVisor."""
    monkeypatch.setattr(Path, "read_text", lambda path: "Name:\tpython\n")
    with writing.new_folder(tmp_path / "whole", tmp_path / "part"):
        pass
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_whom_the_file_system_gives_the_files_of_this_user_is_this_user(public, monkeypatch, mode):
    """NFS maps root to another user (root_squash), and mount options everybody to one (`uid=`)."""
    place = public / "place"
    place.mkdir()
    place.chmod(mode)
    (public / "scratch").mkdir()
    (public / "scratch").chmod(0o777)
    (place / "theirs").touch()
    os.chown(place / "theirs", OTHER, OTHER)
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # a root whose files are the victim's
    with user(VICTIM):
        for _ in range(2):
            _append(place / "file")
            _lock(place / ".lock")
            _private(place / "own")
            writing.require_trusted(place / "own")
        (place / "link").symlink_to(public / "scratch")
        write_atomically(place / "link" / "1", "new")
        with pytest.raises(PermissionError, match=f"theirs belongs to user {OTHER}"):
            _append(place / "theirs")
    assert (place / "file").read_text() == "newnew"
    assert {path.name for path in place.iterdir()} == {"theirs", "file", ".lock", "own", "link"}
