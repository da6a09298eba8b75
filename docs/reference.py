"""Write the pages of docs/reference from the code: `make docs`.

What a field means stands under it in the code, what an option does in its help, how a metric is computed in its
docstring. This script only sets it in Markdown; a test says when a committed page is not what it would write.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeGuard, get_args, get_origin

from pydantic import BaseModel
from typer.main import get_command

from gpipe_sim import cli
from gpipe_sim.base import units
from gpipe_sim.campaign.campaign import Campaign
from gpipe_sim.cost import analytic, profile, transformer
from gpipe_sim.explain import waterfall, worth
from gpipe_sim.explain.predict import Prediction
from gpipe_sim.explain.verdict import verdict
from gpipe_sim.make import planfile
from gpipe_sim.plan import actions, automatic, order_file, orders, program, stages
from gpipe_sim.runs import accuracy, compare, directory
from gpipe_sim.scenario import campaign, catalog, failures, presets, reading, schema
from gpipe_sim.step import memory, metrics, step

PAGES = Path(__file__).parent / "reference"
NOTE = "*Written by `make docs` from {}; change it there.*"


# --- what the code says --------------------------------------------------------------------------------------------


@cache
def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None, str]]:
    """Name, annotation and docstring of everything that is assigned in a module or class."""
    for index, node in enumerate(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, annotation = node.target.id, node.annotation
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, annotation = node.targets[0].id, None
        else:
            continue
        following = body[index + 1] if index + 1 < len(body) else None
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = inspect.cleandoc(str(following.value.value))
        yield name, annotation, text


def field_docs(cls: type) -> dict[str, tuple[ast.expr, str]]:
    """Field -> its annotation as written, and the docstring under it."""
    module = inspect.getmodule(cls)
    assert module is not None
    (node,) = (n for n in ast.walk(_tree(module)) if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
    return {name: (annotation, text) for name, annotation, text in _documented(node.body) if annotation is not None}


@cache
def value_docs() -> dict[str, str]:
    """Name -> docstring of the types of values that scenarios and plans have."""
    written = [*_documented(_tree(schema).body), *_documented(_tree(campaign).body)]
    return {name: text for name, annotation, text in written if text and annotation is None}


def markdown(text: str) -> str:
    """A docstring in Markdown: indented blocks are code in both."""
    return _one_backtick(inspect.cleandoc(text))


def _one_backtick(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text)


def first(text: str | None, paragraphs: int) -> str:
    """The paragraphs of a docstring that concern more than its function's parameters."""
    return "\n\n".join(markdown(text or "").split("\n\n")[:paragraphs])


def sentence(text: str) -> str:
    """A docstring as one cell of a table."""
    return markdown(text).replace("\n", " ").replace("|", "\\|")


# --- types and defaults in words -----------------------------------------------------------------------------------

_WORDS = {"str": "text", "int": "whole number", "float": "number", "bool": "`true` or `false`", "Any": "anything"}
_SECTIONS = {
    "_StageEntry": "stage",
    "_LayerEntry": "layer",
    "_LinkEntry": "link",
    "_SkipEntry": "skip",
    "_RankEntry": "rank",
    "_CurveEntry": "curve",
    "LayerSpec": "layer",
    "Jitter": "jitter",
    "NodeGroup": "group-of-nodes",
    "CheckpointSpec": "campaign-checkpoint",
}


def type_words(node: ast.expr, module: ModuleType) -> str:
    """An annotation in words: ``Count | None`` is a `Count`, a Literal its values."""
    match node:
        case ast.BinOp(left=left, right=ast.Constant(value=None)):
            return type_words(left, module)
        case ast.BinOp(left=left, right=right):
            return f"{type_words(left, module)} or {type_words(right, module)}"
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, *notes])):
            return type_words(kind, module) + _limits(notes, module)
        case ast.Subscript(value=ast.Name(id="Literal")):
            return _choices(eval(ast.unparse(node), vars(module)))
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            return f"list of {type_words(inner, module)}"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[key, value])):
            return f"map from {type_words(key, module)} to {type_words(value, module)}"
        case ast.Name(id=name) if name in value_docs():
            return f"[{name.removesuffix('Field')}](scenario.md#values)"
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.Name(id=name) if name in _SECTIONS:
            return f"[{_SECTIONS[name]}](#{_SECTIONS[name]})"
        case ast.Name(id=name) if name in _aliases(module):
            return type_words(_aliases(module)[name], module)
        case ast.Name(id=name) if get_origin(getattr(module, name, None)) is Literal:
            return _choices(getattr(module, name))
    raise ValueError(f"no words for {ast.unparse(node)}")


def _choices(literal: Any) -> str:
    return ", ".join(f"`{value}`" for value in get_args(literal))


def _limits(notes: list[ast.expr], module: ModuleType) -> str:
    """`` from 0``, `` above 0 to 1``; nothing of bounds that only keep hostile files small, nor of lists' lengths."""
    words = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
    keywords = [keyword for note in notes if isinstance(note, ast.Call) for keyword in note.keywords]
    found = {
        keyword.arg: eval(ast.unparse(keyword.value), vars(module)) for keyword in keywords if keyword.arg in words
    }
    if 0 < found.get("ge", 0) <= 1e-6:  # as good as zero, which it must not be
        found = {"gt": 0} | {key: value for key, value in found.items() if key != "ge"}
    return "".join(
        f" {words[key]} {value:g}" for key, value in found.items() if (key and 1e-6 < abs(value) < 1e6) or value == 0
    )


@cache
def _aliases(module: ModuleType) -> dict[str, ast.expr]:
    """Private names of annotated types, such as ``_Amount``."""
    assigned = [node for node in _tree(module).body if isinstance(node, ast.Assign)]
    named = {node.targets[0].id: node.value for node in assigned if isinstance(node.targets[0], ast.Name)}
    return {name: value for name, value in named.items() if name[0] == "_" and isinstance(value, ast.Subscript)}


def _default(cls: type[BaseModel], name: str, annotation: ast.expr) -> str:
    field = cls.model_fields[name]
    if field.is_required():
        return "required"
    value, kind = field.get_default(call_default_factory=True), ast.unparse(annotation)
    if name in ("balance", "placement", "every"):
        return "`auto`"
    if value is None or value == {}:
        return ""
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, failures.FailureRates):
        return f"`{value.name}`"
    shown = {
        "Bytes": units.format_bytes,
        "Seconds": units.format_seconds,
        "Duration": units.format_duration,
        "Storage": units.format_bandwidth,
    }.get(kind, str)(value)
    return f"`{shown.lower() if isinstance(value, bool) else shown}`"


def fields_table(cls: type[BaseModel], title: str, level: int = 2) -> str:
    """A section of a page: what the class is, and its fields."""
    module = inspect.getmodule(cls)
    assert module is not None
    rows = []
    for name, (annotation, text) in field_docs(cls).items():
        assert text or name == "kind", f"{cls.__name__}.{name} has no docstring"
        meaning = text or "Which of these it is."
        rows.append((f"`{name}`", type_words(annotation, module), _default(cls, name, annotation), sentence(meaning)))
    heading = f"{'#' * level} {title}\n\n{markdown(cls.__doc__ or '')}\n"
    return f"{heading}\n{table(('field', 'value', 'default', 'meaning'), rows)}"


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(cell or ' ' for cell in line)} |\n" for line in lines)


# --- pages ---------------------------------------------------------------------------------------------------------


def page(title: str, sources: str, *parts: str) -> str:
    """A whole page."""
    return "\n".join([f"# {title}\n", NOTE.format(sources) + "\n", *(part.rstrip("\n") + "\n" for part in parts)])


def rest_of(module: ModuleType) -> str:
    """A module's docstring without its first line, which says what the module is, not what the format is."""
    return _one_backtick((module.__doc__ or "").split("\n", 1)[1].strip("\n"))


def scenario_page() -> str:
    """Everything that may stand in a scenario file."""
    spec = vars(schema)
    values = [
        (f"`{name.removesuffix('Field')}`", sentence(text)) for name, text in value_docs().items() if name != "MEASURED"
    ]
    kinds = [fields_table(cls, f"model, `kind: {kind}`") for kind, cls in schema.MODELS.items()]
    return page(
        "The scenario file",
        "`gpipe_sim/scenario/schema.py` and `gpipe_sim/scenario/reading.py`",
        "A scenario is YAML: general fields at the top level, and the sections `model`, `cluster`, `plan` and, for "
        "`gpipe campaign`, `campaign`. Unknown "
        "keys, wrong types and numbers without a unit are mistakes, and all of them are reported at once.",
        "## Sweeps\n\n" + rest_of(reading),
        "## Units\n\n" + rest_of(units),
        fields_table(schema.General, "top level"),
        *kinds,
        fields_table(schema.LayerSpec, "layer"),
        fields_table(schema.Cluster, "cluster"),
        fields_table(schema.NodeGroup, "group of nodes"),
        fields_table(spec["_DeviceSpec"], "device"),
        fields_table(spec["_LinkSpec"], "link"),
        fields_table(schema.Jitter, "jitter"),
        fields_table(schema.PlanSpec, "plan"),
        fields_table(campaign.CampaignSpec, "campaign"),
        fields_table(campaign.CheckpointSpec, "campaign checkpoint"),
        fields_table(vars(campaign)["_FailureSpec"], "failures"),
        "## Values\n\n" + table(("value", "what it may be"), values),
        "## Devices, links, models and failures by name\n\n"
        "What `gpipe catalog` lists; `cpu`, this machine, is not among them here.\n\n" + _catalog_tables(),
    )


def _parameters(preset: str) -> int:
    return transformer.num_parameters(schema.preset_model(preset))


def _catalog_tables() -> str:
    devices = [
        (
            f"`{device.name}`",
            units.format_bytes(device.memory),
            units.format_bandwidth(device.bandwidth),
            ", ".join(f"{dtype} {units.format_compute(peak)}" for dtype, peak in device.compute.items()),
            f"{device.price.per_hour:g} {device.price.currency}/h ({device.price.source})" if device.price else "",
            device.source,
        )
        for device in map(catalog.find_device, catalog.device_names())
        if device.name != "cpu"
    ]
    links = [
        (f"`{link.name}`", units.format_bandwidth(link.bandwidth), units.format_seconds(link.latency), link.source)
        for link in catalog.LINKS.values()
    ]
    models = [(f"`{name}`", f"{_parameters(name):,}", preset.source) for name, preset in presets.PRESETS.items()]
    parts = ("device", "node", "network", "software", "job")
    rates = [
        (
            f"`{one.name}`",
            *(units.format_duration(1 / rate) if (rate := getattr(one, part)) else "" for part in parts),
            one.source,
        )
        for one in failures.FAILURES.values()
    ]
    return (
        table(("device", "memory", "bandwidth", "peak compute", "price", "source"), devices)
        + "\n"
        + table(("link", "each direction", "typical latency", "source"), links)
        + "\n"
        + table(("model", "parameters", "source"), models)
        + "\nMean times between failures of one part:\n\n"
        + table(("failures", *parts, "source"), rates)
    )


def plan_page() -> str:
    """The plan file."""
    spec = vars(planfile)
    return page(
        "The plan file",
        "`gpipe_sim/make/planfile.py`",
        "YAML, written by `gpipe plan --out`. It holds the scenario that it came from and the profile that it is "
        "predicted with, so that it stands alone on another machine.",
        f"```text\n{rest_of(planfile)}\n```",
        fields_table(spec["_PlanFile"], "top level"),
        fields_table(spec["_StageEntry"], "stage"),
        "A model of `kind: python` is looked for beside the plan file: keep the two together.",
    )


def profile_page() -> str:
    """The profile file."""
    spec = vars(profile)
    return page(
        "The profile file",
        "`gpipe_sim/cost/profile.py`",
        "JSON, written by `gpipe profile`. Seconds and bytes are plain numbers here: no person writes this file.",
        rest_of(profile),
        fields_table(spec["_ProfileFile"], "top level"),
        fields_table(spec["_LayerEntry"], "layer"),
        fields_table(spec["_LinkEntry"], "link"),
        fields_table(spec["_SkipEntry"], "skip"),
    )


def run_page() -> str:
    """The run directory."""
    spec = vars(directory)
    return page(
        "The run directory",
        "`gpipe_sim/runs/directory.py`, `gpipe_sim/explain/predict.py` and `gpipe_sim/runs/compare.py`",
        "Made by `gpipe run`. It can be copied to any machine and compared there.",
        rest_of(directory),
        "## predicted.json\n\nOne entry of `results` of `gpipe simulate --json`, see [the metrics](metrics.md).",
        "## measured.json\n",
        fields_table(spec["_MeasuredFile"], "top level", 3),
        fields_table(spec["_RankEntry"], "rank", 3),
        fields_table(spec["_CurveEntry"], "curve", 3),
        "## compare.json\n\nAlso what `gpipe compare --json` prints.\n\n" + keys_table(compare.Comparison.to_dict),
    )


def documented_keys(function: Callable[..., Any]) -> dict[str, str]:
    """Key -> meaning, from the table in a docstring."""
    return dict(re.findall(r"^(\w+) {2,}(.+)$", inspect.cleandoc(function.__doc__ or ""), re.MULTILINE))


def keys_table(function: Callable[..., Any]) -> str:
    """The table of a docstring in Markdown, and what stands above it."""
    rows = [(f"`{key}`", meaning.replace("|", "\\|")) for key, meaning in documented_keys(function).items()]
    return markdown(function.__doc__ or "").split("\n\n")[0] + "\n\n" + table(("key", "meaning"), rows)


def functions(module: ModuleType, *names: str) -> str:
    """Functions with their docstrings, which are definitions."""
    return "\n".join(f"### {name}\n\n{markdown(getattr(module, name).__doc__)}\n" for name in names)


def metrics_page() -> str:
    """Every figure that the tool prints, and how it is computed."""
    defined = [
        name
        for name, value in vars(metrics).items()
        if inspect.isfunction(value) and value.__module__ == metrics.__name__ and name[0] != "_"
    ]
    defined.remove("step_metrics")
    parts = [(f"`{part}`", waterfall.LABELS[part]) for part in waterfall.PARTS]
    return page(
        "Metrics and their formulas",
        "the docstrings of `metrics.py` and `memory.py` in `gpipe_sim/step`, `transformer.py` and `analytic.py` in "
        "`gpipe_sim/cost`, and of the files in `gpipe_sim/explain` and `gpipe_sim/runs`",
        "K ranks, v stages on each and S = K v in all, M micro-batches, N samples in a batch, L layers.",
        "## The keys of `gpipe simulate --json`\n\n"
        'One document, `{"scenario": name, "results": [...]}`, an entry for each plan; for several files a list of '
        "them. `gpipe plan --json` has the front of time against memory as its `results`, and adds `recommended` and "
        "`pareto` (indices into them), `reason` and `certainty`; what it recommends, and how sure it is, are null if "
        "nothing fits. `exact` says whether it is proven that no plan is faster, or that none fits.\n\n"
        + keys_table(Prediction.to_dict),
        "## The keys of `gpipe campaign --json`\n\n" + keys_table(Campaign.to_dict),
        "## Time and bubble\n\n" + functions(metrics, *defined),
        "## What people act on\n\n" + rest_of(worth),
        "## Memory\n\n" + markdown(memory.__doc__ or ""),
        "Peak, activation memory and what the peak is made of:\n\n"
        + table(
            ("figure", "definition"),
            [
                (f"`{name}`", sentence(getattr(step.MemoryCurve, name).__doc__))
                for name in ("total", "peak_bytes", "activation_bytes")
            ]
            + [("`at_peak`", sentence(step.MemoryCurve.at_peak.__doc__ or ""))],
        ),
        "### bytes_per_parameter\n\n" + markdown(transformer.bytes_per_parameter.__doc__ or ""),
        "### What one micro-batch costs a stage\n\n" + first(vars(memory)["_stage_bytes"].__doc__, 2),
        "### What a transformer's layers hold and compute\n\n" + markdown(transformer.transformer_layers.__doc__ or ""),
        "### How long an analytic profile says they take\n\n"
        + markdown(vars(analytic)["_transformer_profile"].__doc__),
        "## The waterfall\n\n" + markdown(waterfall.breakdown_s.__doc__ or ""),
        table(("part", "what reports call it"), parts),
        "### The critical path\n\n" + markdown(waterfall.critical_path.__doc__ or ""),
        "### The verdict\n\n" + first(verdict.__doc__, 2),
        "## Predicted beside measured\n\n" + rest_of(compare),
        keys_table(compare.Comparison.to_dict),
        "## All runs so far\n\n" + rest_of(accuracy),
        "`gpipe accuracy --json` has these figures of `all` runs, and `by` device, schedule and checkpoint mode; and "
        "the `runs` themselves, as the record has them.\n\n"
        + table(
            ("key", "meaning"),
            [(f"`{name}`", sentence(text)) for name, (_, text) in field_docs(accuracy.Accuracy).items()],
        ),
    )


def schedules_page() -> str:
    """Where stages sit, what each rank does in which order, and what an action takes and sends."""
    heads = ("schedule", "placement", "stages per rank", "backwards")
    rows = [
        (f"[`{name}`](#{name})", schedule.pattern, str(schedule.stages_per_rank or "any"), _backwards(schedule))
        for name, schedule in orders.SCHEDULES.items()
    ]
    K, M = _EXAMPLE
    of_example = [
        (f"`{name}`", f"{v}", f"{schedule.bubble_ideal(K, v, M):.1%}", _most_held(schedule, K, v, M))
        for name, schedule in orders.SCHEDULES.items()
        for v in ([schedule.stages_per_rank] if schedule.stages_per_rank else [2, 4])
        if not schedule.most_microbatches
    ]
    pictures = [f"## {name}\n\n{pictured(schedule.order.__doc__)}" for name, schedule in orders.SCHEDULES.items()]
    return page(
        "Actions and schedules",
        "`actions.py`, `orders.py`, `program.py`, `order_file.py` and `automatic.py` in `gpipe_sim/plan`",
        markdown(actions.__doc__ or ""),
        table(
            ("letter", "action", "belongs to"),
            [(f"`{kind.letter}`", kind.name, _belongs(kind)) for kind in actions.KINDS.values()],
        ),
        "## What a schedule says\n\n" + rest_of(orders),
        table(heads, rows),
        "The bubble of equal stages and free links, with F, I and W equally long, and the micro-batches that a stage "
        f"holds at most, for K = {K} ranks and M = {M} micro-batches (`naive` has one, and a bubble of (K-1)/K):\n\n"
        + table(("schedule", "v", "ideal bubble", "held by each stage, at most"), of_example),
        *pictures,
        "## An order from a file: `schedule: my.csv`\n\n" + rest_of(order_file),
        "## An order for these very times: `schedule: auto`\n\n" + rest_of(automatic),
        f"## Recomputation\n\n{pictured(stages.recomputed.__doc__)}",
        "## What an action takes and sends\n\n" + rest_of(program),
    )


_EXAMPLE = 4, 16


def pictured(text: str | None) -> str:
    """A docstring whose indented lines are a picture; the rest is prose."""
    parts = []
    for block in inspect.cleandoc(text or "").split("\n\n"):
        is_picture = "  " in block and not block.endswith(".")
        parts.append(f"```text\n{inspect.cleandoc(block)}\n```" if is_picture else _one_backtick(block))
    return "\n\n".join(parts)


def _backwards(schedule: orders.Schedule) -> str:
    return "split in I and W, some or all" if schedule.splits else "whole"


def _belongs(kind: actions.Kind) -> str:
    if not kind.computes:
        return "the step"
    return "the backward pass" if kind.backward else "the forward pass"


def _most_held(schedule: orders.Schedule, K: int, v: int, M: int) -> str:
    positions = [orders.position_of(schedule.pattern, stage, K) for stage in range(K * v)]
    held = [schedule.in_flight(position, stage, K, v, M) for stage, position in enumerate(positions)]
    return str(held[0]) if len(set(held)) == 1 else " ".join(map(str, held))


def command_page() -> str:
    """Every command with its arguments and options."""
    group: Any = get_command(cli.app)
    parts = [f"{group.help}\n", rest_of(cli)]
    parts.append(table(("command", ""), [(f"[{name}](#{name})", _first(c.help)) for name, c in group.commands.items()]))
    parts.append("`simulate` is a script of its own, and means `gpipe simulate`.")
    for name, command in group.commands.items():
        arguments = [param for param in command.params if not param.opts[0].startswith("-")]
        usage = " ".join(["gpipe", name, *(_metavar(argument) for argument in arguments), "[OPTIONS]"])
        rows = [
            (f"`{_spelling(param)}`", _option_default(param), sentence(param.help or "")) for param in command.params
        ]
        options = table(("argument or option", "default", "meaning"), rows) if rows else "It takes no options.\n"
        parts.append(f"## {name}\n\n    {usage}\n\n{markdown(command.help)}\n\n{options}")
    return page("The command line", "`gpipe_sim/cli.py` and `gpipe_sim/commands/`", *parts)


def _first(text: str) -> str:
    return text.split("\n")[0].replace("|", "\\|")


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _spelling(param: Any) -> str:
    """``--set PATH=VALUE``; a choice is spelt out, a switch has no value."""
    if not param.opts[0].startswith("-"):
        return _metavar(param)
    if param.is_flag:
        return str(param.opts[0])
    kind = param.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"{param.opts[0]} " + "\\|".join(str(choice.value) for choice in kind)
    words: Mapping[Any, str] = {int: "NUMBER", float: "NUMBER", Path: "PATH"}
    return f"{param.opts[0]} {param.metavar or words.get(kind, 'TEXT')}"


def _option_default(param: Any) -> str:
    if param.required:
        return "required"
    if param.default is None or param.default is False:
        return ""
    return f"`{param.default.value if isinstance(param.default, Enum) else param.default}`"


def training_page() -> str:
    """What one trains with. It is read and not imported, since it needs torch, which need not be there."""

    def tree(path: str) -> list[ast.stmt]:
        return ast.parse((PAGES.parents[1] / "gpipe_exec" / path).read_text()).body

    def defined(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
        return isinstance(node, ast.FunctionDef) and not node.name.startswith("_")

    def said(node: ast.FunctionDef | ast.ClassDef) -> str:
        return re.sub(r"^(>>>|\.\.\.)", r"    \1", markdown(ast.get_docstring(node) or ""), flags=re.MULTILINE)

    def described(node: ast.FunctionDef, name: str, level: int) -> str:
        parameters = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
        returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
        call = name if any(ast.unparse(one) == "property" for one in node.decorator_list) else f"{name}({parameters})"
        return f"{'#' * level} {name}\n\n    {call}{returns}\n\n{said(node)}\n"

    def class_of(path: str, name: str) -> ast.ClassDef:
        return next(node for node in tree(path) if isinstance(node, ast.ClassDef) and node.name == name)

    pipeline, held = class_of("engine/pipeline.py", "Pipeline"), class_of("engine/held.py", "Held")
    (made,) = (node for node in pipeline.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    offered = [
        ("engine/world.py", "plan_for_world"),
        ("engine/checkpoint.py", "read_model"),
        ("modules/splitting.py", "split"),
        ("modules/huggingface.py", "split_huggingface"),
        ("modules/huggingface.py", "token_loss"),
        ("engine/pipeline.py", "pin_to_cores"),
        ("devices/process.py", "leave"),
    ]
    others = [next(node for node in tree(path) if defined(node) and node.name == name) for path, name in offered]
    return page(
        "Training",
        "the docstrings of `gpipe_exec`",
        "Everything here is imported from `gpipe_exec`. [Train your model](../howto/training.md) uses it.",
        f"## Pipeline\n\n{said(pipeline)}\n\n" + described(made, "Pipeline", 3).split("\n", 2)[2],
        *(described(node, node.name, 3) for node in (*pipeline.body, *held.body) if defined(node)),
        "## Beside it\n",
        *(described(node, node.name, 3) for node in others if defined(node)),
    )


def pages() -> dict[str, str]:
    """File name -> text."""
    written = {
        "scenario.md": scenario_page(),
        "plan.md": plan_page(),
        "profile.md": profile_page(),
        "run.md": run_page(),
        "schedules.md": schedules_page(),
        "metrics.md": metrics_page(),
        "command.md": command_page(),
        "training.md": training_page(),
    }
    return {name: re.sub(r"[ \t]+\n", "\n", text) for name, text in written.items()}


def main() -> None:
    """Write them."""
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text)
        print(f"wrote docs/reference/{name}")


if __name__ == "__main__":
    main()
