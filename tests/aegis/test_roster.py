"""The roster of a job, driven by simulated members that obey it, fail, are lost, and return."""

import copy
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aegis.roster_helpers import GATHER, PATIENCE, RETURN, Job, sample, shrunk, started
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.roster import Report, State


def test_the_first_nodes_get_the_ranks_and_a_spare_that_of_a_lost_node():
    job = started()
    assert job.roster.ranks == {0: 0, 1: 1, 2: 2}
    job.lose(1, "its connection closed")
    assert (job.roster.order.runs, job.roster.order.is_lost) == (False, True)
    for _ in range(2):
        for index in (0, 2):
            job.obey(index)
    assert job.roster.ranks == {0: 0, 3: 1, 2: 2}
    assert (job.roster.order.attempt, job.roster.order.runs) == (2, True)
    job.say(1, State.RUNNING)  # it is back, and has not noticed
    assert job.come(1) is None
    assert job.roster.order_for(1).rank is None
    job.settle()
    assert job.roster.order.code == SupervisorExit.DONE


def test_an_attempt_has_a_greater_number_than_any_that_a_node_knows():
    job = Job(2, 0)
    job.reports[1] = Report(1, "node-1", "i1", job.job, attempt=7)
    job.come(1)
    job.come(0)
    assert job.roster.order.attempt == 8


def test_nobody_starts_while_a_process_of_the_attempt_before_may_run():
    job = started()
    job.lose(1)
    job.obey(0)
    job.obey(0)
    assert job.reports[0].state is State.READY
    assert not job.roster.order.runs
    job.say(2, State.ENDED)
    assert not job.roster.order.runs
    job.say(2, State.READY)
    assert job.roster.order.runs


def test_a_failure_stops_the_others_and_names_its_cause():
    job = started()
    job.say(2, State.ENDED, text="ValueError: bad", event=17)
    order = job.roster.order_for(0)
    assert (order.runs, order.is_lost) == (False, False)
    assert "node-2 stopped: ValueError: bad" in order.text
    [(_, _, details)] = [event for event in job.events if event[1] == "job-stop"]
    assert (details["cause"], details["cause_node"]) == (17, "node-2")


@pytest.mark.parametrize(
    ("index", "code", "expected"),
    [(1, 75, None), (0, 75, 75), (1, 93, 93), (2, 85, 85), (3, 85, None), (3, 70, None), (1, 96, 96)],
)
def test_a_faulty_node_is_replaced_and_any_other_end_is_that_of_the_job(index, code, expected):
    job = started()
    job.say(index, State.LEFT, code=code, text="Why.")
    assert job.roster.order.code == expected
    assert index not in job.roster.members


def test_a_hang_names_the_process_behind_all_others_and_its_node():
    job = started()
    for index in (0, 1):
        job.say(index, State.RUNNING, samples=[sample(0, 9), sample(1, 9)])
    job.now += 1.0
    job.roster.decide(job.now)
    assert job.roster.order.runs  # what the third node does is not known yet
    job.hang(1)
    order = job.roster.order_for(2)
    assert (order.runs, order.is_lost, order.hang, order.suspects) == (False, False, "device_wait", [3])
    assert "more than its timeout of 5 s. The cause seems to be process 3 on node-1." in order.text
    [detected] = [details for _, code, details in job.events if code == "hang"]
    assert (detected["rank"], detected["step"], detected["seconds"]["detect"]) == (3, 3, 9.0)
    [stop] = [details for _, code, details in job.events if code == "job-stop"]
    assert job.events[stop["cause"] - 1][1] == "hang"


def test_a_node_whose_script_goes_on_after_training_hides_no_hang_of_another():
    job = started()
    for index, samples in enumerate(([], [], [sample(0, 9), sample(1, 8)])):
        job.say(index, State.RUNNING, samples=samples)
    job.now += 1.0
    job.roster.decide(job.now)
    assert job.roster.order.suspects == [5]


def test_no_process_hangs_as_long_as_one_that_others_wait_for_makes_progress():
    job = started()
    for index in range(3):
        job.say(index, State.RUNNING, samples=[sample(0, 9), sample(1, 8, 0.1 if index == 2 else 9.0)])
    job.now += 1.0
    job.roster.decide(job.now)
    assert job.roster.order.runs


@pytest.mark.parametrize(("spares", "suspect", "is_replaced"), [(1, 1, True), (1, 0, False), (0, 1, False)])
def test_a_spare_replaces_the_node_that_seems_to_cause_two_hangs(spares, suspect, is_replaced):
    job = started(3, spares)
    for _ in range(2):
        assert job.roster.order.runs
        assert job.roster.ranks == {0: 0, 1: 1, 2: 2}
        job.hang(suspect)
        for index in [*job.roster.members] * 3:
            job.obey(index)
    assert (suspect not in job.roster.members) == is_replaced
    if is_replaced:
        assert job.roster.ranks == {0: 0, 2: 2, 3: 1}
        assert job.roster.order_for(1).code == SupervisorExit.RETRY_ELSEWHERE
        again = Report(1, "node-1", "i1", job.job)
        assert "node-1 was replaced" in job.roster.admit(again, 0.0).text
        assert job.roster.admit(dataclasses.replace(again, instance="new"), 0.0) is None
        assert job.roster.order_for(1).code is None
    job.settle()
    assert job.roster.order.code == SupervisorExit.DONE


def test_at_the_end_a_replaced_node_learns_how_the_job_ended():
    job = started()
    for _ in range(2):
        job.hang(1)
        for index in [*job.roster.members] * 3:
            job.obey(index)
    job.settle()
    again = Report(1, "node-1", "i1", job.job)
    assert job.roster.admit(again, 0.0).code == SupervisorExit.DONE


def test_without_a_spare_the_job_waits_for_a_node_and_then_asks_for_others():
    job = started(2, 0)
    job.lose(1)
    for _ in range(2):
        job.obey(0)
    job.roster.decide(job.now + RETURN - 1)
    assert not job.roster.has_ended
    assert job.come(1) is None
    job.say(1, State.READY)
    assert (job.roster.order.runs, job.roster.order.attempt) == (True, 2)
    for index in (0, 1):
        job.obey(index)
    job.lose(1)
    for _ in range(2):
        job.obey(0)
    job.roster.decide(job.now)
    job.roster.decide(job.now + RETURN)
    assert job.roster.order.code == SupervisorExit.RETRY_ELSEWHERE
    assert "1 are missing" in job.roster.order.text
    assert "node-1 was lost: it is silent." in job.roster.order.text


def test_without_a_spare_the_job_shrinks_as_its_batches_allow_and_grows_when_nodes_return():
    job = started(4, 0, smaller=(2, 1))
    job.lose(1)
    for index in (0, 2, 3, 0, 2, 3):
        job.obey(index)
    job.roster.decide(job.now)
    assert not job.roster.order.runs
    job.roster.decide(job.now + RETURN)
    assert (job.roster.order.runs, job.roster.order.nodes) == (True, 2)  # three would not divide the batches
    assert job.roster.ranks == {0: 0, 2: 1}
    for index in (0, 2, 3):
        job.obey(index)
    job.say(2, State.ENDED, text="a crash")
    for index in (0, 2):
        job.obey(index)
        job.obey(index)
    assert (job.roster.order.runs, job.roster.order.nodes) == (True, 2)  # at once
    job.obey(0)
    job.obey(2)
    job.say(1, State.READY)
    assert job.come(1) is None
    job.roster.decide(job.now)
    job.roster.decide(job.now + 9)
    assert job.roster.order.runs
    job.roster.decide(job.now + 11)
    assert (job.roster.order.runs, job.roster.order.saves) == (False, True)
    other = copy.deepcopy(job)
    other.lose(2)  # while the processes save, and would wait for it
    assert (other.roster.order.is_lost, other.roster.order.saves) == (True, False)
    job.settle()
    assert (job.roster.order.code, job.roster.order.nodes) == (SupervisorExit.DONE, 4)
    assert job.roster.ranks == {0: 0, 2: 1, 1: 2, 3: 3}


def test_a_restarted_leader_knows_how_many_nodes_train():
    job = shrunk()
    job.roster = job.lead()
    for index in (0, 2):
        job.come(index)
    job.roster.decide(job.now + 100)
    assert (job.roster.order.runs, job.roster.order.nodes) == (True, 2)


def test_a_node_that_replaces_another_and_a_spare_get_copies_from_all():
    job = started(3, 1)
    for index in range(4):
        job.say(index, job.reports[index].state, address=f"h{index}:1")
    assert [job.roster.order_for(index).copies for index in range(4)] == [False, False, False, True]
    assert list(job.roster.order_for(3).peers) == ["h0:1", "h1:1", "h2:1"]
    assert list(job.roster.order_for(1).peers) == ["h0:1"]
    job.lose(1, "its connection closed")
    for index in (0, 2, 0, 2):
        job.obey(index)
    assert [job.roster.order_for(index).copies for index in (0, 2, 3)] == [False, False, True]
    assert list(job.roster.order_for(3).peers) == ["h0:1", "h2:1"]


def test_before_the_first_attempt_the_job_waits_for_the_join_timeout():
    job = Job(2, 1)
    job.come(0)
    job.roster.decide(job.now)
    job.roster.decide(job.now + PATIENCE - 1)
    assert not job.roster.has_ended
    job.roster.decide(job.now + PATIENCE)
    assert (job.roster.order.code, "1, 2 are missing" in job.roster.order.text) == (75, True)


def test_the_loss_of_the_leaders_node_ends_the_job():
    job = started()
    job.lose(0)
    assert job.roster.order.code == SupervisorExit.RETRY_ELSEWHERE


def test_a_job_whose_run_another_one_has_resumed_ends_once_and_is_not_requeued():
    job = started()
    for _ in range(2):
        job.roster.end_superseded()
    assert job.roster.order_for(1).code == SupervisorExit.SUPERSEDED
    assert [code for _, code, _ in job.events].count("job-end") == 1


def test_strangers_duplicates_and_latecomers_are_rejected_by_name():
    job = started()
    other = Report(1, "intruder", "another", job.job)
    assert "intruder) was rejected: node-1 has joined as node 1" in job.roster.admit(other, 0.0).text
    outside = dataclasses.replace(other, index=4)
    assert "numbered from 0 to 3" in job.roster.admit(outside, 0.0).text
    foreign = dataclasses.replace(other, index=3, job={**job.job, "nodes": 4})
    assert "nodes=4 instead of 3" in job.roster.admit(foreign, 0.0).text
    assert job.roster.members[1].name == "node-1"
    job.settle()
    assert job.roster.admit(dataclasses.replace(other, index=3), 0.0).code == SupervisorExit.DONE


def test_a_restarted_leader_takes_over_what_runs():
    job = started()
    job.roster = job.lead()
    for index in (2, 0, 3, 1):
        job.come(index)
    assert job.roster.ranks == {0: 0, 1: 1, 2: 2}
    assert (job.roster.order.attempt, job.roster.order.runs) == (1, True)
    job.roster.decide(job.now + 100)
    assert job.roster.order.runs


def test_a_restarted_leader_replaces_a_node_that_does_not_return():
    job = started()
    job.roster = job.lead()
    for index in (2, 0, 3):
        job.come(index)
    job.roster.decide(job.now + 4)
    assert job.roster.order.runs
    job.roster.decide(job.now + 6)
    assert (job.roster.order.runs, job.roster.order.is_lost) == (False, True)
    del job.reports[1]
    job.settle()
    assert job.roster.order.code == SupervisorExit.DONE
    assert job.roster.ranks == {0: 0, 3: 1, 2: 2}


@pytest.mark.parametrize("rejoined", [(0, 2), (2, 0)])
def test_a_leader_restarted_between_two_attempts_waits_for_no_more_nodes_than_the_last_had(rejoined):
    job = shrunk()
    job.say(2, State.ENDED, text="a crash")
    job.obey(0)
    job.roster = job.lead()
    for index in rejoined:
        job.come(index)
    for index in (0, 2):
        job.obey(index)
    job.roster.decide(job.now)
    job.roster.decide(job.now + GATHER)
    assert (job.roster.order.runs, job.roster.order.nodes, job.roster.order.attempt) == (True, 2, 3)


def test_a_spare_that_cannot_train_is_named_at_once_and_not_chosen_until_it_can():
    job = started(3, 2)
    job.say(3, State.READY, unfit="Its GPU is lost.")
    job.say(3, State.READY, unfit="Its GPU is lost.")
    [detected] = [details for _, code, details in job.events if code == "node-unfit"]
    assert detected["text"] == "node-3 cannot replace another node: Its GPU is lost."
    assert job.roster.order.runs
    for lost, expected in ((1, {0: 0, 2: 2, 4: 1}), (2, None)):
        job.lose(lost)
        for index in [*job.roster.members] * 3:
            job.obey(index)
        assert (job.roster.ranks if job.roster.order.runs else None) == expected
    job.say(3, State.READY, unfit="")
    assert job.roster.ranks == {0: 0, 3: 2, 4: 1}
    job.lose(4)
    job.say(3, State.READY, unfit="Its GPU is lost.")
    job.obey(0)
    job.obey(0)
    job.roster.decide(job.now)
    job.roster.decide(job.now + RETURN)
    assert job.roster.order.code == SupervisorExit.RETRY_ELSEWHERE
    assert "node-3: Its GPU is lost." in job.roster.order.text


def test_the_leaders_node_counts_whatever_a_check_of_it_said():
    job = started(3, 0)
    job.say(0, State.RUNNING, unfit="Its GPU is lost.")
    job.say(1, State.ENDED, text="It crashed.")
    for index in [*job.roster.members] * 3:
        job.obey(index)
    assert job.roster.ranks == {0: 0, 1: 1, 2: 2}
    assert job.roster.order.runs


FAULTS = ["come", "obey", "obey", "obey", "lose", "fail", "hang", "finish", "wait", "lead", "die", "leave", "unfit"]
STEPS = st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 4)), max_size=60)


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(0, 2), st.sets(st.integers(1, 2)), STEPS)
def test_after_any_faults_the_job_ends_and_no_rank_is_ever_given_twice(nodes, spares, smaller, steps):
    job = Job(nodes, spares, [size for size in smaller if size < nodes])
    for name, number in steps:
        index = number % (nodes + spares)
        is_member, has_ended = index in job.roster.members, job.roster.has_ended
        runs = is_member and job.reports[index].state is State.RUNNING
        if name == "come" and not is_member:
            if (rejection := job.come(index)) is not None:
                assert has_ended or "it seemed to cause 2 hangs" in rejection.text
                del job.reports[index]
        elif name == "hang" and not has_ended:
            job.hang(index)
        elif name == "obey" and is_member and not has_ended:
            job.obey(index)
        elif name == "lose":
            job.lose(index)
        elif name == "fail" and runs:
            job.say(index, State.ENDED, text="a crash")
        elif name == "finish" and runs:
            job.say(index, State.FINISHED)
        elif name == "wait":
            job.now += 3.0
            job.roster.decide(job.now)
        elif name == "lead" and not has_ended:
            job.roster = job.lead()
        elif name == "die":
            job.lose(index, "its connection closed")
            job.reports.pop(index, None)
        elif name == "unfit" and is_member and job.reports[index].state is State.READY:
            job.say(index, State.READY, unfit="" if job.reports[index].unfit else "A GPU failed.")
        elif name == "leave" and is_member and index:
            job.say(index, State.LEFT, code=75, text="A GPU failed.")
            del job.reports[index]
        job.check()
    if not job.roster.has_ended:
        job.settle()
    if job.roster.order.code != SupervisorExit.DONE:
        assert job.roster.order.code == SupervisorExit.RETRY_ELSEWHERE
