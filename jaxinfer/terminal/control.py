"""`jaxinfer control`: one call to a server's control port."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from jaxinfer.client import TLS, Control, EngineState, ServerError


def run(args: argparse.Namespace) -> int:
    """Print the response as JSON; return exit code 2 if the call fails."""
    try:
        key = args.api_key_file and args.api_key_file.read_text(encoding="utf-8").partition("\n")[0].strip()
        tls = TLS(ca=args.ca_file) if args.ca_file else False
        with Control(args.target, api_key=key, tls=tls, timeout=args.timeout) as control:
            print(json.dumps(_answer(control, args), indent=2))
    except (OSError, ValueError, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _answer(control: Control, args: argparse.Namespace) -> dict[str, Any]:
    match args.action:
        case "stats":
            return control.stats()
        case "drain":
            return {"aborted": control.drain(args.within)}
        case "abort":
            control.abort(args.argument, tenant=args.tenant)
            return {}
        case "flush":
            return {"pages": control.flush_prefix_cache()}
        case "start-profile":
            control.start_profile(args.steps)
            return {}
        case "stop-profile":
            return {"folder": control.stop_profile()}
        case "abort-all":
            return {"aborted": control.abort_all()}
        case _:
            return dataclasses.asdict(_changed(control, args))


def _changed(control: Control, args: argparse.Namespace) -> EngineState:
    match args.action:
        case "pause":
            return control.pause(args.mode)
        case "resume":
            return control.resume()
        case "sleep":
            return control.sleep(args.level, args.tags, mode=args.mode)
        case "wake-up":
            return control.wake_up(args.tags)
        case "update-weights":
            given = {"weight_version": args.weight_version, "mode": args.mode, "parts": args.parts}
            return control.update_weights(args.argument, **given)
        case _:
            return control.weight_info(checksums=True)
