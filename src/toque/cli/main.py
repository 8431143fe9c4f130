"""The `toque` command: a table of verbs, each in a file of its own that is imported only when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

# verb → (module, attribute, one line of help). The help lives here so that `toque --help` imports nothing else.
VERBS: dict[str, tuple[str, str, str]] = {
    "serve": ("toque.cli.serve", "command", "Serve models over the OpenAI API."),
    "run": ("toque.cli.run", "command", "Chat with a model in the terminal."),
    "pull": ("toque.cli.pull", "command", "Download a model into the local store."),
    "list": ("toque.cli.list_", "command", "List the models in the local store."),
    "show": ("toque.cli.show", "command", "Show one model: files, digests, origin, size."),
    "rm": ("toque.cli.rm", "command", "Remove a model from the local store."),
    "catalog": ("toque.cli.catalog", "command", "List well-known open models, and what fits here."),
    "register": ("toque.cli.register", "command", "Make files the next version of a model."),
    "alias": ("toque.cli.alias", "command", "Point a name such as production to a version."),
    "lineage": ("toque.cli.lineage", "command", "Show what a version was made from, and how."),
    "sign": ("toque.cli.sign", "command", "Sign a version with a key, or make one."),
    "verify": ("toque.cli.verify", "command", "Check who has signed a version."),
    "gc": ("toque.cli.gc", "command", "Free files that nothing refers to."),
    "deploy": ("toque.cli.deploy", "command", "Serve a model on a running server, or change how."),
    "ps": ("toque.cli.ps", "command", "List a server's deployments and replicas."),
    "scale": ("toque.cli.scale", "command", "Change how many replicas a deployment may have."),
    "rollout": ("toque.cli.rollout", "command", "Roll a new model version out, or back."),
    "restart": ("toque.cli.restart", "command", "Replace a deployment's replicas one after another."),
    "start": ("toque.cli.start", "command", "Start a deployment that was stopped."),
    "stop": ("toque.cli.stop", "command", "Stop a deployment, or remove it."),
    "keys": ("toque.cli.keys", "command", "Create, list and revoke API keys."),
    "plan": ("toque.cli.plan", "command", "Say what a model needs, and its speed here, before loading it."),
    "eval": ("toque.cli.eval", "command", "Measure a model's quality: perplexity, KL divergence."),
    "quantize": ("toque.cli.quantize", "command", "Write a smaller copy of a model."),
    "bench": ("toque.cli.bench", "command", "Measure a server: throughput, TTFT, inter-token latency."),
    "usage": ("toque.cli.usage", "command", "Show what was used, its price and its cost."),
    "top": ("toque.cli.top", "command", "Watch a server: throughput, latency, cost."),
    "logs": ("toque.cli.logs", "command", "Show what became of one request."),
    "version": ("toque.cli.version", "command", "Print the version, the backends and the instruction sets."),
}


def overview() -> str:
    lines = [
        "Usage: toque COMMAND [OPTIONS]",
        "",
        "Inference engine and serving platform for language models.",
        "",
    ]
    lines += ["Commands:"]
    lines += [f"  {verb:<9} {text}" for verb, (_, _, text) in VERBS.items()]
    lines += ["", "`toque COMMAND --help` explains one command. Start with: toque run smollm2"]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point. Exit codes: 0 done, 1 a clear error on stderr, 2 wrong usage, 130 interrupted by Ctrl-C."""
    try:
        _call(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def _call(args: list[str]) -> None:
    if not args or args[0] in ("-h", "--help", "help"):
        print(overview())
        sys.exit(0 if args else 2)
    if args[0] in ("-V", "--version"):
        args = ["version", *args[1:]]
    if args[0] not in VERBS:
        print(f"toque: unknown command {args[0][:40]!r}; `toque --help` lists the commands", file=sys.stderr)
        sys.exit(2)
    module, attribute, _ = VERBS[args[0]]
    command = getattr(import_module(module), attribute)
    import click

    from toque.errors import ToqueError

    try:
        # Not standalone: click would end Ctrl-C in "Aborted!" and exit code 1.
        code = command.main(args=args[1:], prog_name=f"toque {args[0]}", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:  # what click makes of Ctrl-C, after a line break
        sys.exit(130)
    except ToqueError as error:
        print(f"toque: {error.message}", file=sys.stderr)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
