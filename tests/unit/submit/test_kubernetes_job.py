"""The Kubernetes manifest: parts that must fit together, and texts that must arrive unchanged."""

import re
from typing import Any

import pytest
import yaml

from lockstep.errors import UserError
from lockstep.submit.job_request import JobRequest, SubmittedCommand, read_machines
from lockstep.submit.kubernetes_job import (
    KubernetesOptions,
    Volume,
    check_kubernetes_name,
    job_manifest,
    kubernetes_name,
    read_volume,
)
from tests.pods import as_kubernetes_starts_it

OPTIONS = KubernetesOptions("me/mine:1", (Volume("runs", "/workspace/runs"),), "/workspace")


def job(*words: str, count: int = 2, setup: str | None = None) -> JobRequest:
    machines = read_machines(count, "4", 4, 8, "64G")
    return JobRequest("mine", SubmittedCommand(words or ("train", "mine.yaml"), "mine", None), machines, 90, setup)


def parts(request: JobRequest, options: KubernetesOptions = OPTIONS) -> list[Any]:
    return list(yaml.safe_load_all(job_manifest(request, options)))


def test_two_pods_that_find_each_other() -> None:
    service, found = parts(job())
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": found["metadata"]["name"]}, "the label that a Job's pods have"
    spec = found["spec"]
    assert (found["apiVersion"], found["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert spec["completions"] == spec["parallelism"] == 2
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    for index in range(2):
        words = as_kubernetes_starts_it(container, index)
        assert words[words.index("--node-rank") + 1] == str(index)
        assert words[words.index("--master-addr") + 1] == "mine-0.mine"
        assert words[words.index("--nnodes") + 1] == "2"
        assert words[-1] == "mine.yaml"


def test_a_single_pod_has_no_rendezvous() -> None:
    (found,) = parts(job(count=1))
    pod = found["spec"]["template"]["spec"]
    assert "subdomain" not in pod
    words = as_kubernetes_starts_it(pod["containers"][0], 0)
    assert words == ["lockstep", "train", "-n", "4", "--grace", "75", "mine.yaml"]


def test_which_exit_codes_are_retried() -> None:
    spec = parts(job())[1]["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert by_code == {75: "Ignore", 143: "Ignore", 2: "FailJob", 4: "FailJob"}
    assert [rule["action"] for rule in rules if "onPodConditions" in rule] == ["Ignore"]
    assert spec["backoffLimit"] == 6
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "a failure policy is refused with any other"


def test_resources_and_volumes_of_a_pod() -> None:
    pod = parts(job())[1]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    amounts = {"cpu": 8, "memory": "64Gi", "nvidia.com/gpu": 4}
    assert container["resources"] == {"requests": amounts, "limits": amounts}
    assert (container["image"], container["workingDir"]) == ("me/mine:1", "/workspace")
    kinds = {volume["name"]: volume for volume in pod["volumes"]}
    found = {mount["mountPath"]: kinds[mount["name"]] for mount in container["volumeMounts"]}
    assert found["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    assert found["/workspace/runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert pod["terminationGracePeriodSeconds"] == 90


NASTY = [
    "a b",
    "it's",
    "$(JOB_COMPLETION_INDEX)",
    "$HOME",
    "$$",
    "x: [y",
    "# no",
    "line\nbreak",
    "ü",
    "no",
    "",
    "{{",
    "*",
]


@pytest.mark.parametrize("setup", [None, "echo $(hostname) '$X'"])
def test_arguments_arrive_unchanged(setup: str | None) -> None:
    (container,) = parts(job("run", "train.py", *NASTY, setup=setup))[1]["spec"]["template"]["spec"]["containers"]
    words = as_kubernetes_starts_it(container, 1)
    assert words[-len(NASTY) :] == NASTY
    if setup is not None:
        assert words[:4] == ["bash", "-c", f'set -e\n{setup}\nexec "$@"', "bash"]


@pytest.mark.parametrize("name", ["", "Mine", "my_job", "-a", "a-", "1a", "a.b", "a b", "a" * 62])
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"--name {re.escape(repr(name))}: expected at most \\d+ lower-case letters"):
        check_kubernetes_name(name, 2)


def test_a_name_leaves_room_for_the_number_of_the_pod() -> None:
    check_kubernetes_name("a" * 61, 10)
    with pytest.raises(UserError, match="at most 60 "):
        check_kubernetes_name("a" * 61, 11)


@pytest.mark.parametrize("title", ["Mine_2.final", "7up", "...", "ÄÖ", "x" * 100, "a-" * 40])
def test_a_name_made_from_a_file_name_is_valid(title: str) -> None:
    check_kubernetes_name(kubernetes_name(title), 1000)


@pytest.mark.parametrize("text", ["runs", "runs:", ":/x", "Runs:/x", "runs:x", "a b:/x", "runs:/x:ro"])
def test_an_invalid_volume_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--volume .*as in runs:/workspace/runs"):
        read_volume(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (KubernetesOptions(""), "--image"),
        (KubernetesOptions("a b"), "--image"),
        (KubernetesOptions("-x"), "--image"),
        (KubernetesOptions("a", folder="here"), "--workdir 'here'"),
        (
            KubernetesOptions("a", (Volume("x", "/p"), Volume("y", "/p"))),
            "--volume …:/p: that folder is",
        ),
        (KubernetesOptions("a", (Volume("x", "/dev/shm"),)), "--volume …:/dev/shm"),
    ],
)
def test_invalid_options_are_refused(options: KubernetesOptions, words: str) -> None:
    with pytest.raises(UserError, match=words):
        options.check()
