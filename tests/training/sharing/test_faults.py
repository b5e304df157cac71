"""`nlq publish` where the Hub refuses, or the connection breaks: nothing has changed, and the same command succeeds
later.
"""

import re
import shutil
from pathlib import Path

import pytest
from support.grids import parametrize_grid
from support.publishing_cases import TOKEN, Done, change_weights, check_refused


pytestmark = pytest.mark.thin(3)


AT_ONCE = {"Retry-After": "0"}


# Method and path of what may fail while publishing, by what it does
STEPS = {
    "create": ("POST", "/api/repos/create"),
    "look": ("GET", "/api/models/anna/faulty"),
    "prepare": ("POST", "/preupload/main"),
    "announce": ("POST", "/info/lfs/objects/batch"),
    "upload": ("PUT", "/upload/"),
    "commit": ("POST", "/commit/main"),
}


# What a user must be told
WORDS = {
    401: "log in",
    403: "may not write",
    404: "no such",
    412: "somebody else",
    500: "the Hub refused (On purpose)",
}


def check_not_published(done: Done, repo: str, *words: str) -> None:
    """In one line, before which the client may have told of each of its attempts."""
    attempts = r"(?:.*(?:thrown while requesting|Retrying in|Rate limited\. Waiting).*\n)*"
    found = re.fullmatch(rf"{attempts}(nlq: error: .*\n)", done.err)
    assert found, done.err
    check_refused(Done(done.status, done.out, found[1]), f"{repo} was not published", *words)


class TestFaults:
    @pytest.fixture(scope="class")
    def folder(self, nlq, run, tmp_path_factory) -> Path:
        folder = tmp_path_factory.mktemp("faulty") / "run"
        shutil.copytree(run[0], folder, ignore=shutil.ignore_patterns("checkpoint-*"))
        nlq.publish(folder, "anna/faulty")
        return folder

    def check(self, server, nlq, folder, *words: str, repo: str = "anna/faulty") -> None:
        def state() -> tuple[list[str], dict[str, bytes]]:
            return (server.commits(repo), server.files(repo)) if repo in server._repos else ([], {})

        change_weights(folder)
        before = state()
        done = nlq("publish", folder, repo)
        server.heal()
        check_not_published(done, repo, *words)
        assert state() == before
        nlq.publish(folder, repo)
        assert len(server.commits(repo)) == (len(before[0]) or 1) + 1
        assert server.files(repo)["model.safetensors"] == (folder / "model.safetensors").read_bytes()

    @pytest.mark.thin(6)
    @parametrize_grid({"step": list(STEPS), "status": list(WORDS)}, strength=1)
    def test_the_hub_refuses(self, step, status, server, nlq, folder):
        server.fail(*STEPS[step], status, headers=AT_ONCE)
        # Who may write to a repository need not be allowed to make it
        repo = f"anna/new-{status}" if step == "create" else "anna/faulty"
        self.check(server, nlq, folder, str(status), WORDS[status], repo=repo)

    @pytest.mark.parametrize("step", ["look", "commit"])
    def test_the_connection_breaks(self, step, server, nlq, folder):
        server.drop(*STEPS[step])
        self.check(server, nlq, folder, "connection", server.endpoint)

    @pytest.mark.parametrize("step", ["upload", "commit"])
    def test_a_server_that_repeats_what_it_was_sent(self, step, server, nlq, folder):
        """`Worker` finds the token wherever it is printed."""
        server.fail(*STEPS[step], 400, message=f"What is this? Authorization: Bearer {TOKEN}")
        self.check(server, nlq, folder, "400", "What is this?")

    def test_somebody_elses_repository(self, server, nlq, folder):
        check_refused(nlq("publish", folder, "bert/model"), "403", "owner")

    def test_token_that_is_none(self, nlq, folder):
        wrong = "hf_" + "WrongSecret" * 3
        done = nlq("publish", folder, "anna/wrong", HF_TOKEN=wrong)
        check_refused(done, "401", "log in")
        assert wrong not in done.err
