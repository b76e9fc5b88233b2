"""`jaxinfer control`: one call to a server's control port."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from jaxinfer.client import TLS, Control, ServerError


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
            control.abort(args.request_id, tenant=args.tenant)
            return {}
        case _:
            return {"pages": control.flush_prefix_cache()}
