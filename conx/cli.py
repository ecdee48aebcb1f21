"""The command `conx`: arguments, tables, progress. No logic."""

import argparse
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import conx
from conx.errors import ConxError
from conx.packing.settings import PRECISIONS, SMALLEST
from conx.report import bytes_text, table

if TYPE_CHECKING:
    from conx.inspection import ModelInfo
    from conx.packing.report import PackReport
    from conx.verification import VerifyReport

__all__ = ["main"]

Progress = Callable[[int, int], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 for an error (one line on stderr), 2 for wrong usage."""
    _prepare_streams()
    args = _parser().parse_args(arguments)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_signal)
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ConxError, OSError) as e:
        return _complain(_describe(e), 1)
    except (ValueError, TypeError) as e:
        return _complain(str(e), 2)
    except MemoryError:
        return _complain("not enough memory", 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except Exception as e:  # a fault of ours; still no traceback unless it is asked for
        if os.environ.get("CONX_TRACEBACK"):
            raise
        return _complain(f"internal error ({type(e).__name__}: {e}); please report it, with CONX_TRACEBACK=1", 1)
    return 0


def _prepare_streams() -> None:
    """Print whatever names a model has, also where the terminal lacks the letters or there is none."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _on_signal(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # so that temporary files are removed on the way out


def _complain(text: str, status: int) -> int:
    print("conx:", " ".join(text.split()), file=sys.stderr)
    return status


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror or error}"
    return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="conx", description="Store ONNX models small, run them at full precision.")
    parser.add_argument("--version", action="version", version=f"conx {conx.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    _add_pack(commands)

    unpack = _command(commands, "unpack", _unpack, "write the model of a .conx file as .onnx")
    unpack.add_argument("file", metavar="FILE.conx")
    unpack.add_argument("-o", "--output", metavar="OUT.onnx", help="default: the file's name with .onnx")
    unpack.add_argument(
        "--precision",
        help="the graph that a session of this precision opens, like fp16 (default: the model as it was built)",
    )
    unpack.add_argument("--dedup", action="store_true", help="make equal initializers one")
    unpack.add_argument(
        "--original", metavar="DIR", help="write the files that the model was, byte for byte, into this folder"
    )
    unpack.add_argument("--threads", type=int, metavar="N")

    dequantize = _command(commands, "dequantize", _dequantize, "make a float model of a quantized one")
    dequantize.add_argument("model", metavar="IN.onnx")
    dequantize.add_argument("-o", "--output", required=True, metavar="OUT.onnx")
    dequantize.add_argument(
        "--keep-activations", action="store_true", help="leave the quantization of activations where it is"
    )
    dequantize.add_argument("--json", action="store_true", help="the report, as JSON")

    info = _command(commands, "info", _info, "show what a .conx or .onnx file holds")
    info.add_argument("file", metavar="FILE")
    info.add_argument("--json", action="store_true", help="everything, as JSON")
    info.add_argument("--tensors", action="store_true", help="a line for each stored tensor")

    check = _command(commands, "check", _check, "check that a .conx file is whole")
    check.add_argument("file", metavar="FILE.conx")
    check.add_argument("--deep", action="store_true", help="hash and decode everything: finds a change of any byte")
    _add_work(check)

    verify = _command(commands, "verify", _verify, "compare a .conx file's outputs with those of the original")
    verify.add_argument("file", metavar="FILE.conx")
    verify.add_argument("--against", required=True, metavar="MODEL.onnx", help="what the file was packed from")
    verify.add_argument("--inputs", metavar="FILE.npz", help="inputs, or a folder of such files (default: random ones)")
    verify.add_argument("--precision", action="append", help="which to compare (default: all that the file has)")
    verify.add_argument("--max-error", type=float, metavar="E", help="exit with status 1 where an rms error is larger")
    verify.add_argument("--json", action="store_true")

    doctor = _command(commands, "doctor", _doctor, "show what is installed and how it would load a file")
    doctor.add_argument("file", metavar="FILE.conx", nargs="?")

    _command(commands, "demo", _demo, "pack, load and run a small model that comes with conx")
    return parser


def _add_pack(commands: Any) -> None:
    pack = _command(commands, "pack", _pack, "pack an .onnx model into a .conx file")
    pack.add_argument("model", metavar="MODEL.onnx")
    pack.add_argument("-o", "--output", metavar="OUT.conx", help="default: the model's name with .conx")
    pack.add_argument("--lossless", action="store_true", help="keep every weight bit for bit")
    # An option of its own, as one with a value that may be left out would take the model's name for it.
    pack.add_argument(
        f"--lossless={SMALLEST}",
        dest="lossless",
        action="store_const",
        const=SMALLEST,
        default=False,
        help="the same in a smaller file that loads more slowly",
    )
    pack.add_argument(
        "--bits", type=int, choices=range(2, 9), help="bits of a code (default 8); fewer are smaller and coarser"
    )
    pack.add_argument(
        "--block-size", type=int, metavar="N", help="a scale for each N weights instead of for each channel"
    )
    pack.add_argument(
        "--palette", type=int, choices=range(1, 9), metavar="BITS", help="a palette of 2^BITS values instead of a grid"
    )
    pack.add_argument(
        "--keep", action="append", default=[], metavar="PATTERN", help="store weights of such names bit for bit"
    )
    pack.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATTERN=RULE",
        help="a rule for weights of such names: lossless, smallest, or bits:N,block:N, or palette:N,group:N",
    )
    pack.add_argument(
        "--precisions",
        default=",".join(PRECISIONS),
        metavar="LIST",
        help="graphs to make beside the model's own (default: %(default)s)",
    )
    pack.add_argument("--calibrate", metavar="INPUTS.npz", help="inputs to try float16 and measure outputs on")
    pack.add_argument("--half-io", action="store_true", help="the float16 graph takes and gives float16")
    pack.add_argument(
        "--quantized", metavar="TWIN.onnx", help="a quantized form of the model, whose codes its weights get"
    )
    pack.add_argument(
        "--no-original", action="store_true", help="do not keep what brings the model's own files back byte for byte"
    )
    pack.add_argument("--no-verify", action="store_true", help="do not run the model and what is made of it")
    pack.add_argument("--json", action="store_true", help="print the report as JSON")
    _add_work(pack)


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    return parser


def _add_work(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, metavar="N", help="default: one for each core")
    parser.add_argument("--quiet", action="store_true", help="no progress, no table")


def _pack(args: argparse.Namespace) -> None:
    rules = [_split_rule(text) for text in args.set]
    with _progress("packing", args.quiet) as progress:
        report = conx.pack(
            args.model,
            args.output,
            lossless=args.lossless,
            bits=args.bits,
            block_size=args.block_size,
            palette=args.palette,
            keep=args.keep,
            overrides=rules,
            precisions=[name for name in args.precisions.split(",") if name],
            quantized=args.quantized,
            verify=not args.no_verify,
            calibration=args.calibrate,
            half_io=args.half_io,
            original=not args.no_original,
            threads=args.threads,
            progress=progress,
        )
    if args.json:
        print(json.dumps(report.to_dict(), indent=1))
    elif not args.quiet:
        _print_report(report)


def _split_rule(text: str) -> tuple[str, str]:
    pattern, equals, rule = text.rpartition("=")
    if not equals or not pattern:
        raise ValueError(f"--set {text!r}: write PATTERN=RULE, like '*.attn.*=bits:6'")
    return pattern, rule


def _print_report(report: "PackReport") -> None:
    rows = [
        [
            row.kind,
            str(row.tensors or ""),
            bytes_text(row.before) if row.before else "",
            bytes_text(row.after),
            f"{row.after / row.before:.3f}" if row.before else "",
            f"{row.mean_error:.2e}" if row.worst_error else "0" if row.tensors else "",
            f"{row.worst_error:.2e}  {row.worst_name}" if row.worst_error else "",
        ]
        for row in report.by_kind
    ]
    print(table(["kind", "tensors", "before", "after", "ratio", "mean error", "worst error"], rows))
    exact = "every weight bit for bit" if report.lossless else "errors are root mean squares over the weight's"
    print(
        f"{report.source} {bytes_text(report.source_bytes)} -> {report.path} {bytes_text(report.bytes)}"
        f" ({report.ratio:.3f}) in {report.seconds:.1f} s; {exact}"
    )
    if report.pairs is not None:
        for what, names in (("matched", report.pairs.matched), ("doubtful", report.pairs.doubtful)):
            print(f"{what} {len(names)} weights of the quantized form" + (f": {', '.join(names)}" if names else ""))
        print(f"unmatched {len(report.pairs.unmatched)}: {', '.join(report.pairs.unmatched) or 'none'}")
    if report.outputs is not None:
        print(f"\nOutputs on {report.outputs.runs} inputs, against the model's:")
        _print_errors(report.outputs)
    elif report.unmeasured != "not asked for":
        print(f"Outputs were not compared: {report.unmeasured}")


def _print_errors(report: "VerifyReport") -> None:
    head = ["precision", "output", "cosine", "error (rms)", "largest", "top-1", "equal", "NaN/Inf"]
    rows = [
        [
            e.precision,
            e.output,
            f"{e.cosine:.7f}",
            f"{e.rms:.2e}",
            f"{e.peak:.2e}",
            "" if e.top1 is None else f"{e.top1:.3f}",
            f"{e.equal:.3f}",
            str(e.nonfinite),
        ]
        for e in report.errors
    ]
    print(table(head, rows))


def _unpack(args: argparse.Namespace) -> None:
    folder = args.original
    output = args.output if folder is None else folder
    if folder is not None and args.output is not None:
        raise ValueError("--original names a folder: it goes without --output")
    print(
        conx.unpack(
            args.file,
            output,
            precision=args.precision,
            original=folder is not None,
            dedup=args.dedup,
            threads=args.threads,
        )
    )


def _dequantize(args: argparse.Namespace) -> None:
    from conx.dequantizing import dequantize_file

    report = dequantize_file(args.model, args.output, keep_activations=args.keep_activations)
    if args.json:
        print(json.dumps(report.to_dict(), indent=1))
        return
    print(table(["undone", "operators"], [[name, str(count)] for name, count in report.undone.items()]))
    if report.left:
        print("\nWhat stays:")
        print(table(["operator", "node", "why"], [[left.op_type, left.node, left.reason] for left in report.left]))
    print(args.output)


def _info(args: argparse.Namespace) -> None:
    info = conx.inspect(args.file)
    if args.json:
        print(json.dumps(info.to_dict(), indent=1))
        return
    _print_info(info)
    if args.tensors:
        rows = [
            [
                t.name,
                t.dtype,
                "x".join(map(str, t.shape)),
                t.codec,
                bytes_text(t.bytes),
                bytes_text(t.stored),
                str(t.uses),
                f"{t.error:.2e}",
                ", ".join([*t.shared[:2], *(["…"] if len(t.shared) > 2 else [])]),
            ]
            for t in info.tensors
        ]
        print(table(["tensor", "type", "shape", "codec", "bytes", "stored", "uses", "error", "shared with"], rows))


def _print_info(info: "ModelInfo") -> None:
    graph = info.graph
    rows = [
        ["file", f"{info.path}, {bytes_text(info.file_bytes)}"],
        ["model", f"{graph.get('producer') or 'producer unknown'}, {bytes_text(info.source_bytes)}"],
        ["parameters", _parameters_text(info)],
        ["weights", ", ".join(f"{name} {bytes_text(size)}" for name, size in info.by_dtype.items())],
        *([["shared", _shared_text(info)]] if info.saved else []),
        ["in memory", ", ".join(f"{name} {bytes_text(size)}" for name, size in info.memory.items())],
        ["precisions", ", ".join(info.precisions)],
        ["nodes", f"{graph.get('nodes')}, subgraphs {graph.get('subgraphs')}, functions {graph.get('functions')}"],
        [
            "opsets",
            ", ".join(f"{k} {v}" for k, v in graph.get("opsets", {}).items()) + f", IR {graph.get('ir_version')}",
        ],
        *([f"{side[:-1]}", _value_text(v)] for side in ("inputs", "outputs") for v in graph.get(side, [])),
    ]
    if info.format == "conx":
        rows += [
            ["stored", ", ".join(f"{name} {bytes_text(size)}" for name, size in info.by_codec.items())],
            ["lossless", "yes" if info.lossless else "no"],
            *([["brings back", ", ".join(info.originals)]] if info.originals else []),
            ["packed by", info.producer],
            ["content", info.content_id],
        ]
    print(table([], rows))


def _parameters_text(info: "ModelInfo") -> str:
    apart = [f"{info.unique_parameters:,} unique"]
    apart += [f"{info.quantization_parameters:,} scales and zero points"] if info.quantization_parameters else []
    apart += [f"{info.constants:,} constants"] if info.constants else []
    return f"{info.parameters:,} ({', '.join(apart)})"


def _shared_text(info: "ModelInfo") -> str:
    tied = [t for t in info.tensors if t.uses > 1]
    text = f"{len(tied)} tensors stand for {sum(t.uses for t in tied)} weights, {bytes_text(info.saved)} saved"
    return text + "; --tensors names them"


def _value_text(value: dict[str, Any]) -> str:
    shape = "x".join(str(d) if d != "" else "?" for d in value.get("shape", [])) if "shape" in value else "any shape"
    return f"{value['name']}: {value['type']} {shape}".rstrip()


def _check(args: argparse.Namespace) -> None:
    with _progress("checking", args.quiet) as progress:
        report = conx.check(args.file, deep=args.deep, threads=args.threads, progress=progress)
    if not args.quiet:
        what = (
            "every byte is right"
            if report.deep
            else "header, index and chunk table are right; --deep checks every byte"
        )
        print(f"{args.file}: {what} ({report.tensors} tensors, {report.graphs} graphs, {bytes_text(report.bytes)})")


def _verify(args: argparse.Namespace) -> None:
    report = conx.verify(args.file, args.against, inputs=args.inputs, precisions=args.precision)
    if args.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        _print_errors(report)
    worst = report.worst()
    if args.max_error is not None and (worst.nonfinite or not worst.rms <= args.max_error):
        raise ConxError(
            f"{args.file}: output {worst.output!r} at precision {worst.precision} has an error of {worst.rms:.2e}"
            f" and {worst.nonfinite} stray NaN or Inf; {args.max_error:g} is allowed"
        )


def _doctor(args: argparse.Namespace) -> None:
    from conx.doctor import diagnose

    print(diagnose(args.file))


def _demo(_args: argparse.Namespace) -> None:
    from conx.demo import run_demo

    run_demo(print)


@contextmanager
def _progress(text: str, quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on a terminal, if rich is installed."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
