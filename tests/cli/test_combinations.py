"""Options without effect are refused: by the one table of which go together, or by the library."""

import shutil

import msgspec
import pytest
from typer.main import get_command

from helpers.timing import short_timings
from snapvit_export.allocation.recipe import WITHOUT_IMAGES
from snapvit_export.budget import Budget
from snapvit_export.cli.app import app
from snapvit_export.cli.combinations import RULES, Rule, refuse_idle
from snapvit_export.family.folder import read_family
from snapvit_export.family.manifest import Limits
from snapvit_export.progress import Silent
from snapvit_export.prune.rank.criteria import CRITERIA, make_criterion
from snapvit_export.runtimes.device import Accelerator
from snapvit_export.selection.known_profiles import FamilyProfile
from snapvit_export.selection.on_device import TimingOptions, choose_in_family

COMMANDS = get_command(app).commands

# Options that always have an effect, and switches of what is printed.
ALWAYS = {
    "export": "--model --data --out --sparsity --flops --params --pair --tokens --resolution --ranking --for --threads "
    "--batch --no-correct --images --seed --precision --static-batch --uint8-input --classes --reference "
    "--save-torch --json --quiet",
    "rank": "--out --recipe --allocation --depth --seed --rounds --force --json --quiet",
    "pack": "--model --ranking --out --no-correct --no-fidelity --classes --json --quiet",
    "profile": "--target --out --batch --seconds --force --json --quiet",
    "choose": "--budget --at --max-size --max-params --strict --profile --json --quiet",
    "evaluate": "--by --data --images --pair --out --device --force --json --quiet",
    "fleet": "--budget --at --strict --json",
    "validate": "--data --by --min-accuracy --images --seed --model --runtime --threads --batch --json --quiet",
    "compare": "--recipes --flops --model --data --on --by --images --judged --seed --device --out --force --json "
    "--quiet",
    "run": "--deadline --fps --top --variant --runtime --threads --json --quiet",
    "serve": "--deadline --port --host --hit --late --max-batch --queue --max-bytes --max-pixels --drain --runtime "
    "--threads --quiet",
    "recover": "--data --budget --elastic --epochs --train --rate --recipe --labels --batch --model --seed --device "
    "--crop --autocast --json --quiet",
    "report": "--out --format --beside --force --json --quiet",
    "inspect": "--runtime --json",
    "import-scores": "--out --model --force --json",
    "export-scores": "--out --model-type --force --json",
    "models": "--json",
    "doctor": "--json",
}

ONNX_OPTIONS = {"--output": "x", "--preprocessing": "deit_tiny_patch16_224", "--mean": "0.5", "--std": "0.5"}
ONNX_OPTIONS |= {"--resize": "256"}
# What the library refuses, with words of its answer: only a file or the settings of a recipe can tell. FAMILY was not
# chosen for a budget; CHOSEN was; GPU.json has latencies of a GPU.
BY_LIBRARY = [
    (("export", "--budget", "--for jetson-thor --budget 10ms"), "Leave --budget out"),
    (("export", "--depth", "--budget 10ms --levers width"), "--levers and --depth"),
    (("export", "--levers", "--flops 0.5 --levers precision"), "precision does not change FLOPs"),
    (("export", "--build-only", ""), "--build-only builds TensorRT engines"),
    (("export", "--single-file", "--budget 10ms --runtime openvino --precision int8"), "leave --single-file"),
    (("export", "--flavour", "--budget 10ms --runtime openvino --precision int8 --flavour ort"), "--flavour out"),
    (("export", "--checkpoint", "--budget 10ms"), "--checkpoint does not go with bundled"),
    (("rank", "--checkpoint", ""), "--checkpoint does not go with bundled"),
    (("pack", "--checkpoint", ""), "--checkpoint does not go with bundled"),
    (("compare", "--checkpoint", ""), "--checkpoint does not go with bundled"),
    (("evaluate", "--checkpoint", ""), "--checkpoint does not go with bundled"),
    *(
        ((command, option, f"{given} {option} {value}"), "they are for ONNX files")
        for command, given in (
            ("export", "--budget 10ms"),
            ("rank", ""),
            ("pack", ""),
            ("evaluate", ""),
        )
        for option, value in ONNX_OPTIONS.items()
    ),
    *(
        ((command, "--model-arg", f"{given} --model-arg depth=3"), "--model-arg")
        for command, given in (
            ("export", "--budget 10ms"),
            ("rank", ""),
            ("pack", ""),
            ("compare", ""),
            ("evaluate", ""),
        )
    ),
    *(
        ((command, option, f"{given} {option} {value}"), "--pool and --image-size do not go with bundled")
        for command, given in (
            ("export", "--budget 10ms"),
            ("rank", ""),
            ("pack", ""),
            ("compare", ""),
            ("evaluate", ""),
            ("recover", "FAMILY --elastic --model bundled"),
        )
        for option, value in (("--pool", "avg"), ("--image-size", "64"))
    ),
    (("rank", "--data", "--recipe local --criterion magnitude --data digits"), "Leave --data out"),
    (("rank", "--images", "--recipe local --criterion magnitude"), "--images has no part"),
    (("rank", "--evaluations", "--rounds 0.8"), "rounds go without a search"),
    (("rank", "--device", "--device cuda"), "no CUDA device works here"),
    (("rank", "--engine", "--engine torch"), "--engine is for candidates of a search. Give --evaluations"),
    (("rank", "--autocast", "--autocast none"), "--autocast is for candidates of a search. Give --evaluations"),
    (("rank", "--most-moved", ""), "Give --rounds"),
    (("rank", "--recover", ""), "Give --rounds"),
    (("rank", "--damping", "--recipe local --damping max:0.1"), "--damping has no part"),
    (("rank", "--order", "--recipe local --order variance"), "--order has no part"),
    (("rank", "--criterion", "--criterion snip"), "--criterion has no part"),
    (("rank", "--views", "--views distinct"), "--views has no part"),
    (("rank", "--reduction", "--reduction per_sample"), "--reduction has no part"),
    (("rank", "--optimiser", "--optimiser xnes"), "--optimiser has no part"),
    (("rank", "--population", "--population 4"), "--population has no part"),
    (("rank", "--pairs", "--recipe local --pairs 0.3:0.2"), "--pairs has no part"),
    (("rank", "--flops", "--flops 0.5"), "--flops has no part"),
    (("rank", "--divergence", "--divergence cosine"), "--divergence has no part"),
    (("rank", "--search-images", "--search-images 8"), "--search-images has no part"),
    (("rank", "--pca", "--recipe local"), "--pca has no part"),
    (("rank", "--cka", "--recipe local"), "--cka has no part"),
    (("rank", "--racing", ""), "--racing has no part"),
    (("rank", "--cka-images", "--recipe paper --cka-images 500"), "--cka-images has no part"),
    (("rank", "--cka-file", "--recipe paper --cka-file FILE"), "--cka-file keeps the covariance of --cka"),
    (("rank", "--search-over", "--search-over mlp"), "--search-over has no part"),
    (("evaluate", "--classes", "--by knn"), "Add head to --by"),
    (("evaluate", "--features", "--by segment"), "Leave --features out"),
    (("evaluate", "--ranking", ""), "Give either --sparsity"),
    (("evaluate", "--sparsity", ""), "Give --ranking"),
    (("evaluate", "--flops", ""), "Give --ranking"),
    (("evaluate", "--runtime", "--runtime openvino"), "Leave it out"),
    (("evaluate", "--runtime", "--runtime openvino --data digits,cifar10"), "Leave them out"),
    (("evaluate", "--seeds", "--seeds 0,13"), "--seeds would all give the same"),
    (("evaluate", "--features", "--data digits,cifar10 --features f"), "--features keeps those of one model"),
    (("compare", "--classes", "--by knn"), "Add head to --by"),
    (("compare", "--evaluations", "--recipes magnitude,snip"), "--evaluations are those of a search"),
    (("validate", "--classes", "FAMILY --by knn"), "Add head to --by"),
    (("validate", "--seconds", "FAMILY"), "--seconds is how long variants are timed"),
    (("validate", "--measure", "FAMILY --profile GPU.json"), "--profile and --measure contradict"),
    (("validate", "--profile", "CHOSEN --profile GPU.json"), "was chosen by its latencies"),
    (("validate", "--checkpoint", "FAMILY"), "no such checkpoint file"),
    (("choose", "--tokens", "FAMILY --budget 90% --tokens 0.5"), "Give --elastic"),
    (("choose", "--resolution", "FAMILY --budget 90% --resolution 64"), "Give --elastic"),
    (("choose", "--levers", "FAMILY --budget 90% --levers width"), "Give --elastic"),
    (("choose", "--prefer", "FAMILY --budget 90% --prefer accuracy"), "Give --data"),
    (("choose", "--pin", "FAMILY --budget 90% --profile GPU.json --pin 0"), "Leave --pin out"),
    *(
        (("choose", option, f"FAMILY --budget 90% --profile GPU.json {given}"), "latencies of a GPU decide alone")
        for option, given in (
            ("--elastic", ""),
            ("--data", ""),
            ("--runtime", "--runtime openvino"),
            ("--threads", ""),
            ("--batch", ""),
            ("--pause", ""),
        )
    ),
    (("report", "--budget", "CHOSEN --budget 9ms"), "Leave --budget out"),
    (("report", "--sparsity", "FAMILY --sparsity 0.3"), "--sparsity says what a ranking keeps"),
    (("report", "--flops", "FAMILY --flops 0.5"), "--flops says what a ranking keeps"),
    (("report", "--pair", "FAMILY --pair 0.3:0.2"), "--pair says what a ranking keeps"),
    (("recover", "--out", "FAMILY --elastic"), "Leave it out"),
    (("recover", "--checkpoint", "FAMILY --elastic --model bundled"), "--checkpoint does not go with bundled"),
    (("recover", "--model-arg", "FAMILY --elastic --model bundled --model-arg depth=3"), "--model-arg"),
]
NEEDED = {
    "profile": ["x"],
    "run": ["x", "y"],
    "evaluate": ["x"],
    "validate": ["x"],
    "inspect": ["x"],
    "recover": ["x"],
}  # arguments without which none run


def option_of(command, name):
    return next(option for option in COMMANDS[command].params if name in option.opts)


def words_for(command: str, condition: str) -> list[str]:
    """The condition as words of a command line, with some value where it names none."""
    name, _, value = condition.partition("=")
    if getattr(option_of(command, name), "is_flag", False):
        return [name]
    return [name, value.split("|")[0].replace("*", "") or "1"]


def given_by(rule: Rule) -> list[str]:
    named = [condition for condition in rule.beside if condition != "--target=local"]  # which is the default
    return [word for condition in (rule.option, *named) for word in words_for(rule.command, condition)]


def by_name(rule: Rule) -> str:
    return " ".join((rule.command, rule.option, *rule.beside))


@pytest.mark.parametrize("rule", RULES, ids=by_name)
def test_an_option_without_effect_is_refused_and_the_line_names_both(snapvit, rule):
    outcome = snapvit(rule.command, *NEEDED.get(rule.command, []), *given_by(rule))
    assert outcome.code == 2
    assert outcome.out == ""
    line = outcome.error_line
    assert line.startswith(f"error: {rule.option.partition('=')[0]} ")
    assert all(condition.partition("=")[0] in line for condition in rule.beside)
    assert not rule.unless or any(condition.partition("=")[0] in line for condition in rule.unless)
    assert "Give" in line or "Leave" in line


@pytest.mark.parametrize(("rule", "other"), [(rule, other) for rule in RULES for other in rule.unless], ids=str)
def test_the_same_option_is_fine_where_it_has_an_effect(rule, other):
    words = [condition.partition("=") for condition in (rule.option, *rule.beside, other)]
    values = {name: value.split("|")[0].replace("*", "") for name, _, value in words}
    refuse_idle(rule.command, set(values), values, [rule])


def test_every_option_has_an_effect_always_or_a_rule_when_it_has_none():
    """A new option makes somebody think: when has it no effect?"""
    ruled = {(rule.command, rule.option.partition("=")[0]) for rule in RULES}
    ruled |= {(command, option) for (command, option, _), _ in BY_LIBRARY}
    always = {(command, option) for command, options in ALWAYS.items() for option in options.split()}
    options = {
        (name, option.opts[0])
        for name, command in COMMANDS.items()
        for option in command.params
        if option.param_type_name == "option" and option.name != "help"
    }
    assert options - always - ruled == set()
    assert always & ruled == set()
    assert always | ruled <= options


@pytest.fixture(scope="module")
def files(plain_family, tmp_path_factory):
    """The places that commands of this file name."""
    folder = tmp_path_factory.mktemp("combinations")
    shutil.copytree(plain_family, folder / "FAMILY")
    shutil.copytree(plain_family, folder / "CHOSEN")
    with short_timings():
        choose_in_family(folder / "CHOSEN", Budget.parse("1000ms"), Limits(), TimingOptions(), Silent())
    manifest = read_family(folder / "FAMILY")
    gpu = Accelerator(
        name="Orin", software={}, power_mode="MAXN", clocks_mhz={}, temperatures_c={}, memory_bytes=8 << 30
    )
    device = msgspec.structs.replace(manifest.target.device, accelerator=gpu)
    profiles = {variant.name: variant.profile for variant in manifest.variants}
    target = msgspec.structs.replace(manifest.target, device=device)
    FamilyProfile(model=manifest.model, target=target, profiles=profiles).save(folder / "GPU.json")
    return folder


@pytest.mark.parametrize(
    ("case", "says"), BY_LIBRARY, ids=lambda part: " ".join(part) if isinstance(part, tuple) else ""
)
def test_what_only_files_or_recipes_tell_is_refused_by_the_library(snapvit, files, tmp_path, monkeypatch, case, says):
    command, option, given = case
    monkeypatch.chdir(tmp_path)
    words = [str(files / word) if (files / word).exists() else word for word in given.split()]
    if option not in words:
        words += words_for(command, option)
    outcome = snapvit(command, *words)
    assert outcome.code in (1, 2)
    assert says in outcome.error_line
    assert outcome.out == ""
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_criteria_that_read_no_images_are_those_of_the_table():
    assert tuple(name for name in CRITERIA if make_criterion(name).needs == "nothing") == WITHOUT_IMAGES
