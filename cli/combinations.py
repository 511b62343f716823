"""Which options of a command go together: one table, by which an option that would have no effect is refused.

Whoever gives an option expects one. The table is applied to what stands on the command line, before anything is read;
what only a file or the settings of a recipe can tell is refused by the library. Where a wish is met anyway, as that of
`--no-correct` by a recipe that corrects nothing, there is nothing to refuse. `tests/cli/test_combinations.py` wants
every option of every command here, or among those that always have an effect.

A condition is an option that is given, `--ranking`, or an option with its value, given or by default: `--target=local`,
`--by=*segment*`, `--recipe=local|idap`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..errors import UsageError


@dataclass(frozen=True)
class Rule:
    """An option of a command that is refused beside all of some others, unless one of yet others is there."""

    command: str
    option: str
    why: str  # after the option: what it lacks or what makes it idle, and what to do
    beside: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    def is_broken(self, holds: Callable[[str], bool]) -> bool:
        return holds(self.option) and all(map(holds, self.beside)) and not any(map(holds, self.unless))

    @property
    def text(self) -> str:
        return f"{self.option.partition('=')[0]} {self.why}"


UNCORRECTED = "--recipe=paper|snapvit|local|idap|fptp*|llm-surgeon*|nvit*"  # recipes that correct nothing unless asked
BY_SCORES_ALONE = UNCORRECTED + "|sparsegpt|vbp"  # that take statistics for their correction alone
CORRECTS = "--correction=refit|elastic|sequential|sparsegpt|mean"
CUTS = ("--budget", "--sparsity", "--flops", "--params", "--pair", "--for", "--build-only")
SIZES = ("--pair", "--sparsity", "--flops")  # that `evaluate` cuts to
MIXES = ("--budget", "--for", "--build-only", "--levers=*tokens*|all")
JETSON = "jetson://*"  # a --target
BY_ITSELF = ("--runtime", "--threads", "--pause", "--pin")  # of what the agent on a board does as it does

RULES = (
    Rule(
        "export",
        "--damping",
        "is of covariances, and this --correction takes means alone. Leave it out",
        beside=("--correction=mean",),
    ),
    Rule(
        "export",
        "--damping",
        "is of covariances, and this --recipe takes means alone. Give --correction refit too, or leave it out",
        beside=("--recipe=vbp",),
        unless=("--correction",),
    ),
    Rule(
        "export",
        "--correction=refit|sequential|sparsegpt|mean",
        "needs torch, and an ONNX file as --model is cut without it. Leave it out, or give elastic",
        beside=("--model=*.onnx",),
    ),
    Rule(
        "export",
        "--at",
        "is the percentile that meets a budget. Give --budget 10ms too, or leave it out",
        unless=("--budget",),
    ),
    Rule(
        "export",
        "--max-size",
        "is a limit beside a budget. Give --budget 10ms too, or leave it out",
        unless=("--budget",),
    ),
    Rule(
        "export",
        "--max-params",
        "is a limit beside a budget. Give --budget 10ms too, or leave it out",
        unless=("--budget",),
    ),
    Rule(
        "export", "--strict", "is about meeting a budget. Give --budget 10ms too, or leave it out", unless=("--budget",)
    ),
    Rule(
        "export",
        "--prefer",
        "compares candidates, and nothing is to be chosen here. Give --budget 10ms too, or --flops with "
        "--levers tokens,width",
        unless=MIXES,
    ),
    Rule(
        "export",
        "--recipe",
        "says how to rank, and --ranking is made. Give one of them; --correction and --no-correct say what becomes "
        "of the weights",
        beside=("--ranking",),
    ),
    Rule(
        "export",
        "--evaluations",
        "are those of a search for a ranking, and --ranking is made. Give one of them",
        beside=("--ranking",),
    ),
    Rule(
        "export",
        "--correction",
        "repairs what was cut, and --tokens and --resolution cut no weights. Leave it out, or give --flops 0.7 too",
        unless=CUTS,
    ),
    *(
        Rule(
            command,
            "--damping",
            "is of statistics, which this --recipe with --no-correct takes none of. Leave it out",
            beside=("--no-correct", BY_SCORES_ALONE),
        )
        for command in ("export", "pack")
    ),
    Rule(
        "export",
        "--damping",
        "is of statistics, which --ranking with --no-correct needs none of. Leave it out",
        beside=("--no-correct", "--ranking"),
    ),
    Rule(
        "export",
        "--damping",
        "is of statistics, which this --recipe takes none of unless it corrects. Give --correction refit too, or "
        "leave it out",
        beside=(UNCORRECTED,),
        unless=("--correction",),
    ),
    Rule(
        "export",
        "--levers=*precision*",
        "names precision, which --precision fixes. Leave one of them out, or give --precision auto",
        beside=("--precision",),
        unless=("--precision=auto",),
    ),
    *(
        Rule(
            command,
            "--device",
            "computes rankings and corrections, and with --ranking and --no-correct there are none. Leave it out",
            beside=("--ranking", "--no-correct"),
        )
        for command in ("export", "pack")
    ),
    Rule("export", "--card", "is what --for says of the device. Give one of them", beside=("--for",)),
    Rule("export", "--runtime", "is what --for says of the device. Give one of them", beside=("--for",)),
    Rule("export", "--build-only", "is what --for says of the device. Give one of them", beside=("--for",)),
    Rule("pack", "--recipe", "says how to rank, and --ranking is made. Give one of them", beside=("--ranking",)),
    Rule(
        "pack",
        "--evaluations",
        "are those of a search for a ranking, and --ranking is made. Give one of them",
        beside=("--ranking",),
    ),
    *(
        Rule(
            "pack",
            option,
            "is about images, and --ranking with --no-correct needs none. Leave it out",
            beside=("--ranking", "--no-correct"),
        )
        for option in ("--data", "--images", "--seed", "--damping")
    ),
    Rule(
        "profile",
        "--python",
        "is that of another machine, and --target is local. Give --target ssh://user@host, or leave it out",
        beside=("--target=local",),
    ),
    *(
        Rule(
            "profile",
            option,
            "is not for --agent, which times in TensorRT alone. Leave one of them out",
            beside=("--agent",),
        )
        for option in BY_ITSELF
    ),
    Rule(
        "profile",
        "--budget",
        "is met in one power mode, and --power-modes times several. Leave one of them out",
        beside=("--power-modes",),
    ),
    Rule(
        "profile",
        "--agent",
        "is for another machine. Give --target ssh://user@host, or leave it out",
        beside=("--target=local",),
    ),
    Rule("profile", "--agent", "is what --target jetson:// says. Leave it out", beside=(f"--target={JETSON}",)),
    *(
        Rule(
            "profile",
            option,
            "is not for --target jetson://, which the agent times in TensorRT alone. Leave it out",
            beside=(f"--target={JETSON}",),
        )
        for option in BY_ITSELF
    ),
    *(
        Rule(
            "profile",
            option,
            "is for a board that the agent times. Give --target jetson://user@host, or leave it out",
            unless=(f"--target={JETSON}", "--agent"),
        )
        for option in ("--trtexec", "--soak", "--power-modes")
    ),
    Rule(
        "profile",
        "--budget",
        "chooses by what the agent measures on a board. Give --target jetson://user@host too; to choose on this "
        "machine: snapvit choose FAMILY --budget 10ms",
        unless=(f"--target={JETSON}", "--agent"),
    ),
    Rule(
        "profile",
        "--at",
        "is the percentile that meets a budget. Give --budget 10ms too, or leave it out",
        unless=("--budget",),
    ),
    Rule(
        "profile",
        "--strict",
        "is about meeting a budget. Give --budget 10ms too, or leave it out",
        unless=("--budget",),
    ),
    Rule(
        "evaluate",
        "--ignore",
        "names values of masks, which --by segment and in-context read. Give --by segment, or leave it out",
        unless=("--by=*segment*|*in-context*",),
    ),
    Rule(
        "evaluate",
        "--segmenter",
        "says how --by segment learns. Give --by segment, or leave it out",
        unless=("--by=*segment*",),
    ),
    Rule("evaluate", "--recipe", "says how to rank, and --ranking is made. Give one of them", beside=("--ranking",)),
    *(
        Rule(
            "evaluate",
            option,
            "is for correcting and ranking, and --ranking is made. Give --correction elastic too, or leave it out",
            beside=("--ranking",),
            unless=(CORRECTS,),
        )
        for option in ("--damping", "--calibrate", "--calibration-images")
    ),
    Rule(
        "evaluate",
        "--damping",
        "is of statistics, which this --recipe takes none of without a correction. Give --correction elastic too, or "
        "leave it out",
        beside=(BY_SCORES_ALONE,),
        unless=(CORRECTS,),
    ),
    Rule(
        "evaluate",
        "--damping",
        "is of covariances, and this --correction takes means alone. Leave it out",
        beside=("--correction=mean",),
    ),
    *(
        Rule(
            "evaluate",
            option,
            f"{is_about}, and nothing is cut. Give --pair 0.35:0.2, --sparsity or --flops too, or leave it out",
            unless=SIZES,
        )
        for option, is_about in (
            ("--recipe", "ranks what is to be cut"),
            ("--correction", "repairs what was cut"),
            ("--damping", "is of a correction or a ranking"),
            ("--calibrate", "names images to correct and rank on"),
            ("--calibration-images", "are for correcting and ranking"),
        )
    ),
    Rule("evaluate", "--seed", "is one, and --seeds are several. Give one of them", beside=("--seeds",)),
    Rule(
        "evaluate",
        "--bank-patches",
        "is what --by in-context compares with. Give --by in-context, or leave it out",
        unless=("--by=*in-context*",),
    ),
    Rule(
        "evaluate",
        "--merge-train-valid",
        "is about what k-NN and the linear probe learn from. Give --by knn or linear, or leave it out",
        beside=("--by",),
        unless=("--by=*knn*|*linear*",),
    ),
    Rule(
        "validate",
        "--seconds",
        "is how long variants are timed, and --profile has their latencies. Give one of them",
        beside=("--profile",),
    ),
    *(
        Rule(
            "validate",
            option,
            "is of the model that is compared with torch. Give --model too, or leave it out",
            unless=("--model", "--checkpoint"),
        )
        for option in ("--model-arg", "--pool", "--image-size")
    ),
    Rule(
        "run", "--hit", "chooses among variants, and --variant names one. Leave one of them out", beside=("--variant",)
    ),
    *(
        Rule(
            "run",
            option,
            "is about keeping a deadline. Give --deadline 10ms too, or leave it out",
            unless=("--deadline", "--fps"),
        )
        for option in ("--hit", "--late", "--record")
    ),
    Rule("run", "--frames", "is how long a camera runs. Give --fps 30 too, or leave it out", unless=("--fps",)),
    *(
        Rule(
            "rank",
            option,
            "is about rounds that train what they cut. Give --rounds 0.85,0.7 --recover too, or leave it out",
            unless=("--recover",),
        )
        for option in ("--max-drop", "--epochs", "--train", "--labels")
    ),
    Rule(
        "rank",
        "--most-moved",
        "is for rounds that refit; with --recover --max-drop ends them. Leave it out",
        beside=("--recover",),
    ),
    Rule(
        "rank",
        "--divergence",
        "is what rounds that refit measure; with --recover --max-drop counts answers. Leave it out",
        beside=("--recover",),
    ),
    Rule("recover", "--minutes", "and --epochs both say how long. Give one of them", beside=("--epochs",)),
    Rule(
        "recover",
        "--recompute",
        "is for one variant, and --elastic trains several at once. Leave --recompute out",
        beside=("--elastic",),
    ),
    Rule("recover", "--variant", "names some, and --elastic means all. Give one of them", beside=("--elastic",)),
    Rule("recover", "--variant", "and --budget each say what to recover. Give one of them", beside=("--budget",)),
    Rule("compare", "--sparsity", "and --flops are two measures of size. Give one", beside=("--flops",)),
    Rule("inspect", "--target", "is the older name of --runtime. Give one of them", beside=("--runtime",)),
)


def refuse_idle(
    command: str, given: Collection[str], values: Mapping[str, object], rules: Sequence[Rule] = RULES
) -> None:
    """Refuse options that have no effect beside the others; `values` has those that were not given too."""

    def holds(condition: str) -> bool:
        option, has_value, wanted = condition.partition("=")
        if not has_value:
            return option in given
        return any(fnmatchcase(str(values.get(option)), pattern) for pattern in wanted.split("|"))

    for rule in rules:
        if rule.command == command and rule.is_broken(holds):
            raise UsageError(rule.text)
