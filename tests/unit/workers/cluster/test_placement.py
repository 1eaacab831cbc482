import pytest

from distill_rl.config.schema import Config, ParallelConfig, TeacherConfig
from distill_rl.errors import ConfigError
from distill_rl.workers.cluster.placement import EVALUATOR, ActorPlacement, Node, actor_names, place_actors, shortage


def config(student=(1, 1), teachers=((1, 1),), kd_weight=1.0):
    settings = Config()
    settings.student.parallel = ParallelConfig(*student)
    settings.teachers = [TeacherConfig(name=f"t{i}", parallel=ParallelConfig(*size)) for i, size in enumerate(teachers)]
    settings.loss.kd_weight = kd_weight
    return settings


def test_ranks_are_named_in_dp_major_order():
    student, teachers, aligners = actor_names(config(student=(2, 2), teachers=((1, 2),)))
    assert student == ["student-dp0-tp0", "student-dp0-tp1", "student-dp1-tp0", "student-dp1-tp1"]
    assert teachers == {"t0": ["t0/dp0-tp0", "t0/dp0-tp1"]}
    assert aligners == ["aligner-0"]
    settings = config(teachers=((1, 1),))
    settings.student.parallel = ParallelConfig(dp=1, sp=2, tp=2)
    settings.teachers[0].parallel = ParallelConfig(dp=2, sp=2)
    student, teachers, _ = actor_names(settings)
    assert student == [f"student-dp0-sp{sp}-tp{tp}" for sp in range(2) for tp in range(2)]
    assert teachers == {"t0": [f"t0/dp{dp}-sp{sp}-tp0" for dp in range(2) for sp in range(2)]}


@pytest.mark.parametrize("gpus", [False, True])
@pytest.mark.parametrize(
    ("student", "teachers"), [((1, 1), ((1, 1),)), ((2, 2), ((1, 2), (2, 1))), ((1, 1), ((2, 2),))]
)
def test_every_actor_is_placed_and_no_bundle_oversubscribed(student, teachers, gpus):
    plan = place_actors(config(student, teachers), gpus=gpus)
    names = actor_names(config(student, teachers))
    assert set(plan.placements) == {*names[0], *names[2], *(name for group in names[1].values() for name in group)}
    for i, bundle in enumerate(plan.bundles):
        inside = [place for place in plan.placements.values() if place.bundle == i]
        assert len(inside) == bundle["CPU"]
        assert sum(place.num_gpus for place in inside) <= bundle.get("GPU", 0) + 1e-9


def test_colocated_ranks_share_a_gpu_and_aligners_have_none():
    plan = place_actors(config(), gpus=True)
    assert plan.placements["student-dp0-tp0"].bundle == plan.placements["t0/dp0-tp0"].bundle
    assert plan.placements["student-dp0-tp0"].num_gpus == plan.placements["t0/dp0-tp0"].num_gpus == 0.5
    assert plan.placements["aligner-0"].num_gpus == 0
    assert "GPU" not in plan.bundles[plan.placements["aligner-0"].bundle]


def test_aligners_with_a_gpu_share_join_the_ranks_in_turn():
    settings = config(student=(2, 1), teachers=((2, 1),))
    settings.aligner.num_gpus = 0.2
    plan = place_actors(settings, 3, gpus=True)
    assert [plan.placements[f"aligner-{i}"].bundle for i in range(3)] == [0, 1, 0]
    assert {plan.placements[f"aligner-{i}"].num_gpus for i in range(3)} == {0.2}
    for i, bundle in enumerate(plan.bundles):
        inside = [place for place in plan.placements.values() if place.bundle == i]
        assert sum(place.num_gpus for place in inside) == pytest.approx(bundle["GPU"])
    assert "GPU" not in place_actors(settings, 3, gpus=False).bundles[-1]


def test_aligners_that_take_a_whole_gpu_are_refused():
    settings = config()
    settings.aligner.num_gpus = 0.5
    with pytest.raises(
        ConfigError,
        match=r"^aligner\.num_gpus: .* must leave them some of it; got aligner-0, aligner-1 with 1 of one GPU",
    ):
        place_actors(settings, 2, gpus=True)


def test_aligners_without_gpu_have_separate_bundles():
    plan = place_actors(config(), 3, gpus=False)
    assert [plan.bundles[plan.placements[f"aligner-{i}"].bundle] for i in range(3)] == [{"CPU": 1.0}] * 3
    assert len({plan.placements[f"aligner-{i}"].bundle for i in range(3)}) == 3


def test_no_bundle_without_aligners():
    plan = place_actors(config(), 0, gpus=True)
    assert len(plan.bundles) == 1
    assert set(plan.placements) == {"student-dp0-tp0", "t0/dp0-tp0"}


def test_no_teacher_is_placed_without_distillation():
    assert not any(name.startswith("t0") for name in place_actors(config(kd_weight=0.0), gpus=False).placements)


def test_shortage_names_asked_total_and_free_amounts():
    plan = place_actors(config(), gpus=True)
    line = shortage(plan, {"CPU": 2.0}, {"CPU": 1.0})
    assert line == "CPU: asked 3, cluster has 2, free 1, GPU: asked 1, cluster has 0, free 0"


def disaggregated(**sizes):
    settings = config(**sizes)
    settings.ray.placement = "disaggregated"
    return settings


def node(name, **resources):
    return Node(name, resources)


def test_disaggregated_ranks_have_a_gpu_each():
    plan = place_actors(disaggregated(student=(2, 1), teachers=((1, 2), (1, 1))), gpus=True)
    ranks = [place for name, place in plan.placements.items() if not name.startswith("aligner")]
    assert {place.num_gpus for place in ranks} == {1.0}
    assert len({place.bundle for place in ranks}) == len(ranks) == 5
    assert plan.nodes == ()


@pytest.mark.parametrize("name", ["cuda_ipc", "shared_memory"])
def test_one_node_transport_is_refused_between_nodes(name):
    settings = disaggregated(student=(1, 1), teachers=((1, 1),))
    settings.transport = name
    with pytest.raises(
        ConfigError, match=rf"transport: {name} works inside one node; got ray\.placement=disaggregated"
    ):
        place_actors(settings, gpus=2, nodes=[node("a", CPU=8, GPU=1), node("b", CPU=8, GPU=1)])
    assert place_actors(settings, gpus=2, nodes=[node("a", CPU=8, GPU=2)]).nodes == ()


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("a", CPU=8, GPU=2), node("b", CPU=8, GPU=2)], ["a", "a", "b", "b"]),
        ([node("a", CPU=8, GPU=1), node("b", CPU=8, GPU=1), node("c", CPU=8, GPU=4)], ["a", "b", "c", "c"]),
        ([node("a", CPU=8, GPU=3), node("b", CPU=8, GPU=2)], ["a", "a", "b", "b"]),
        (
            [node("a", CPU=1, GPU=8), node("b", CPU=8, GPU=8)],
            None,
        ),  # room for one rank of the student on the first, then none left for the teachers
        ([node("a", CPU=8, GPU=8)], None),
    ],
)
def test_student_and_teachers_get_separate_nodes_if_possible(nodes, expected):
    plan = place_actors(disaggregated(student=(2, 1), teachers=((1, 2),)), gpus=True, nodes=nodes)
    assert [*plan.nodes] == ([] if expected is None else [*expected, None])


def test_cpu_nodes_are_filled_by_their_cores():
    plan = place_actors(disaggregated(), 0, gpus=False, nodes=[node("a", CPU=2), node("b", CPU=2)])
    assert plan.nodes == ("a", "b")
    assert shortage(plan, {"CPU": 4}, {"CPU": 1}).endswith("free 1, on the nodes a, b")


def test_colocated_ranks_are_not_pinned():
    assert place_actors(config(), gpus=True, nodes=[node("a", CPU=9, GPU=9), node("b", CPU=9, GPU=9)]).nodes == ()


def with_suites(placement="colocated", **sizes):
    settings = config(**sizes)
    settings.evaluate.suites = ["mmlu"]
    settings.ray.placement = placement
    return settings


def test_no_evaluator_without_suites():
    assert EVALUATOR not in place_actors(config(), gpus=4).placements


def test_evaluator_gets_a_gpu_that_is_left_over():
    plan = place_actors(with_suites(), 1, gpus=2)
    assert plan.placements[EVALUATOR].num_gpus == 1.0
    assert plan.bundles[plan.placements[EVALUATOR].bundle] == {"CPU": 1.0, "GPU": 1.0}
    assert plan.placements["student-dp0-tp0"].num_gpus == 0.5


def test_evaluator_shares_the_first_gpu_if_none_is_left():
    plan = place_actors(with_suites(student=(2, 1)), 1, gpus=2)
    assert plan.placements[EVALUATOR].bundle == plan.placements["student-dp0-tp0"].bundle == 0
    assert plan.placements[EVALUATOR].num_gpus == 0.2
    assert plan.placements["student-dp0-tp0"].num_gpus == pytest.approx(0.4)
    assert plan.placements["student-dp1-tp0"].num_gpus == 1.0


def test_evaluator_takes_its_share_and_leaves_the_rest():
    settings = with_suites()
    settings.evaluate.gpu_share = 0.5
    plan = place_actors(settings, 1, gpus=1)
    assert plan.placements[EVALUATOR].num_gpus == 0.5
    assert plan.placements["student-dp0-tp0"].num_gpus == plan.placements["t0/dp0-tp0"].num_gpus == 0.25
    settings.evaluate.gpu_share = 1.0
    with pytest.raises(ConfigError, match=r"^evaluate\.gpu_share: .* got evaluator with 1 of one GPU"):
        place_actors(settings, 1, gpus=1)


def test_ranks_beside_an_evaluator_have_limited_memory():
    placements = place_actors(with_suites(student=(2, 1)), 1, gpus=2, needs={"student": 30.0, "t0": 10.0}).placements
    assert placements["student-dp0-tp0"].gpu_memory == pytest.approx(0.6)
    assert placements["t0/dp0-tp0"].gpu_memory == pytest.approx(0.2)
    assert placements["student-dp1-tp0"].gpu_memory == 1.0, "its GPU has no evaluator"
    equal = place_actors(with_suites(), 1, gpus=1).placements
    assert equal["student-dp0-tp0"].gpu_memory == equal["t0/dp0-tp0"].gpu_memory == pytest.approx(0.4)


def test_ranks_without_an_evaluator_have_all_memory():
    for plan in (
        place_actors(config(), gpus=1),
        place_actors(with_suites(), 1, gpus=2),
        place_actors(with_suites(), 1, gpus=0),
    ):
        assert {place.gpu_memory for place in plan.placements.values()} == {1.0}


def test_evaluator_on_cpus_has_a_separate_bundle():
    plan = place_actors(with_suites(), 1, gpus=0)
    assert plan.bundles[plan.placements[EVALUATOR].bundle] == {"CPU": 1.0}
    assert plan.placements[EVALUATOR].num_gpus == 0


def split(tp, backend="hf", **sizes):
    settings = with_suites(**sizes)
    settings.evaluate.parallel.tp, settings.evaluate.backend = tp, backend
    return settings


def test_ranks_of_a_split_evaluator_get_gpus_that_are_left_over():
    plan = place_actors(split(2), 1, gpus=3)
    bundles = [plan.placements[f"evaluator-tp{i}"].bundle for i in range(2)]
    assert [plan.bundles[bundle] for bundle in bundles] == [{"CPU": 1.0, "GPU": 1.0}] * 2
    assert bundles[0] != bundles[1]
    assert plan.placements["student-dp0-tp0"].num_gpus == 0.5
    assert EVALUATOR not in plan.placements


@pytest.mark.parametrize(("gpus", "student", "shares"), [(2, (2, 1), [0.2, 0.2]), (2, (1, 1), [0.2, 1.0])])
def test_ranks_of_a_split_evaluator_never_share_a_gpu(gpus, student, shares):
    plan = place_actors(split(2, student=student), 1, gpus=gpus)
    places = [plan.placements[f"evaluator-tp{i}"] for i in range(2)]
    assert [place.num_gpus for place in places] == shares
    assert places[0].bundle != places[1].bundle
    assert sum(bundle.get("GPU", 0) for bundle in plan.bundles) == gpus
    assert plan.placements["student-dp0-tp0"].gpu_memory < 1.0


def test_vllm_splits_a_model_over_the_free_gpus_of_one_actor():
    plan = place_actors(split(2, "vllm"), 1, gpus=3)
    assert plan.bundles[plan.placements[EVALUATOR].bundle] == {"CPU": 1.0, "GPU": 2.0}
    with pytest.raises(ConfigError, match=r"vllm needs 2 free GPUs; student and teachers use 1 of 2; lower it, or set"):
        place_actors(split(2, "vllm"), 1, gpus=2)


def test_split_evaluator_needs_as_many_gpus():
    with pytest.raises(ConfigError, match=r"^evaluate\.parallel\.tp: 4 GPUs are asked, there are 2; lower it"):
        place_actors(split(4), 1, gpus=2)
    on_cpus = place_actors(split(4), 1, gpus=0)
    assert {f"evaluator-tp{i}" for i in range(4)} < set(on_cpus.placements)


def test_disaggregated_evaluator_may_be_on_any_node():
    nodes = [node("a", CPU=4, GPU=2), node("b", CPU=4, GPU=2)]
    plan = place_actors(with_suites("disaggregated", student=(1, 1), teachers=((1, 1),)), 0, gpus=4, nodes=nodes)
    assert plan.nodes == ("a", "b", None)
    assert plan.placements[EVALUATOR].num_gpus == 1.0


def test_ranks_of_a_replica_are_pinned_to_one_node():
    settings = config(student=(4, 2, 2), teachers=((2, 1),))
    nodes = [Node("a", {"CPU": 99.0, "GPU": 6.0}), Node("b", {"CPU": 99.0, "GPU": 4.0})]
    plan = place_actors(settings, gpus=10, nodes=nodes)
    assert plan.nodes[:8] == ("a",) * 4 + ("b",) * 4
    assert set(plan.nodes[8:]) == {None}, "an aligner is on any node"
    assert len(plan.nodes) == len(plan.bundles)


def test_replicas_that_fit_on_no_node_are_not_pinned():
    nodes = [Node(name, {"CPU": 99.0, "GPU": 3.0}) for name in "abc"]
    assert place_actors(config(student=(4, 2, 2)), gpus=9, nodes=nodes).nodes == ()
    assert place_actors(config(student=(4, 2, 2)), gpus=9, nodes=nodes[:1]).nodes == ()


def in_vllm(placement="colocated", gpu_share=None, **sizes):
    """A run with two teachers, the first of them in vLLM."""
    settings = config(**{"teachers": ((1, 1), (1, 1))} | sizes)
    settings.teachers[0].backend, settings.teachers[0].vllm.gpu_share = "vllm", gpu_share
    settings.ray.placement = placement
    return settings


def test_an_engine_on_several_gpus_is_one_actor_and_shares_none_of_them():
    settings = in_vllm(teachers=((2, 4), (1, 1)))
    assert actor_names(settings)[1]["t0"] == ["t0/dp0-tp0", "t0/dp1-tp0"]
    plan = place_actors(settings, gpus=9)
    for name in ("t0/dp0-tp0", "t0/dp1-tp0"):
        place = plan.placements[name]
        assert (place.num_gpus, place.gpu_memory) == (4.0, 1.0)
        assert plan.bundles[place.bundle] == {"CPU": 1.0, "GPU": 4.0}
    assert plan.placements["student-dp0-tp0"].bundle == plan.placements["t1/dp0-tp0"].bundle
    assert plan.placements["student-dp0-tp0"].gpu_memory == 1.0
    assert sum(bundle.get("GPU", 0) for bundle in plan.bundles) == 9
    assert place_actors(in_vllm("disaggregated", teachers=((2, 4), (1, 1))), gpus=10).placements == {
        **{f"t0/dp{i}-tp0": ActorPlacement(2 + i, 4.0) for i in range(2)},
        "student-dp0-tp0": ActorPlacement(0, 1.0),
        "t1/dp0-tp0": ActorPlacement(1, 1.0),
        "aligner-0": ActorPlacement(4, 0.0),
    }


def test_ranks_beside_an_engine_are_limited_to_what_it_leaves():
    plan = place_actors(in_vllm(), gpus=1, needs={"student": 30.0, "t1": 10.0})
    assert plan.placements["t0/dp0-tp0"] == ActorPlacement(0, 0.4, 0.4)
    assert plan.placements["student-dp0-tp0"].num_gpus == plan.placements["t1/dp0-tp0"].num_gpus == 0.3
    assert plan.placements["student-dp0-tp0"].gpu_memory == pytest.approx(0.45)
    assert plan.placements["t1/dp0-tp0"].gpu_memory == pytest.approx(0.15)
    smaller = place_actors(in_vllm(gpu_share=0.1), gpus=1).placements
    assert smaller["t0/dp0-tp0"].gpu_memory == 0.1
    assert smaller["student-dp0-tp0"].gpu_memory == pytest.approx(0.45)


def test_an_engine_alone_on_a_gpu_has_all_of_it():
    for settings in (in_vllm("disaggregated"), in_vllm(student=(1, 1), teachers=((2, 1), (1, 1)))):
        plan = place_actors(settings, gpus=4)
        assert plan.placements[actor_names(settings)[1]["t0"][-1]].gpu_memory == 1.0
    on_cpus = place_actors(in_vllm(teachers=((1, 2), (1, 1))), gpus=0)
    assert {place.gpu_memory for place in on_cpus.placements.values()} == {1.0}
    assert all("GPU" not in bundle for bundle in on_cpus.bundles)


def test_an_engine_that_takes_the_whole_gpu_is_refused():
    with pytest.raises(
        ConfigError, match=r"^teachers\[\]\.vllm\.gpu_share: .* got t0/dp0-tp0 with 1 of one GPU; lower it"
    ):
        place_actors(in_vllm(gpu_share=1.0), gpus=1)


def test_an_engine_and_an_evaluator_share_one_gpu():
    settings = in_vllm()
    settings.evaluate.suites = ["mmlu"]
    placements = place_actors(settings, gpus=1).placements
    assert placements[EVALUATOR].num_gpus == 0.2
    assert placements["student-dp0-tp0"].gpu_memory == pytest.approx(0.2)
    split = in_vllm(teachers=((1, 2), (1, 1)))
    split.evaluate.suites = ["mmlu"]
    placements = place_actors(split, gpus=3).placements
    assert placements[EVALUATOR].bundle == placements["student-dp0-tp0"].bundle
    assert place_actors(split, gpus=4).placements[EVALUATOR].num_gpus == 1.0
