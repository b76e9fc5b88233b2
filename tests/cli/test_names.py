"""Command lines that people type for vLLM, SGLang, llama.cpp and TensorRT-LLM, their flags after our commands."""

import dataclasses
import math
import pathlib
import shlex
from typing import Any

import pytest

from jaxinfer.bench import commands as bench
from jaxinfer.bench import options
from jaxinfer.bench.datasets import Lengths
from jaxinfer.cli import chat, compile, generate, serve
from jaxinfer.config.aliases import ALIASES, ALWAYS, HINTS, SWITCHES

PARSERS = {
    "vllm serve": serve,
    "python -m vllm.entrypoints.openai.api_server": serve,
    "python -m sglang.launch_server": serve,
    "llama-server": serve,
    "trtllm-serve": serve,
    "llama-cli": generate,
    "vllm chat": chat,
    "trtllm-build": compile,
    "vllm bench": bench,
    "python -m sglang.bench_serving": options,
}
SPECULATIVE = '{"method": "eagle3", "model": "a/heads", "num_speculative_tokens": 3}'
LOOKUP = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
RUN: dict[str, dict[str, Any]] = {
    # vLLM
    "vllm serve a/b": {"model": "a/b"},
    "vllm serve a/b --port 8001": {"http_port": 8001},
    "vllm serve a/b --host 127.0.0.1 --port 8000 --dtype auto": {"host": "127.0.0.1", "dtype": "auto"},
    "vllm serve a/b --dtype half": {"dtype": "half"},
    "vllm serve a/b --tensor-parallel-size 2": {"tensor_parallel_size": 2},
    "vllm serve a/b -tp 4": {"tensor_parallel_size": 4},
    "vllm serve a/b -tp 2 -pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "vllm serve a/b --data-parallel-size 2": {"data_parallel_size": 2},
    "vllm serve a/b -dp 2": {"data_parallel_size": 2},
    "vllm serve a/b --max-model-len 8192": {"max_model_len": 8192},
    "vllm serve a/b --max_model_len 32K": {"max_model_len": 32768},
    "vllm serve a/b --gpu-memory-utilization 0.95": {"memory_utilization": 0.95},
    "vllm serve a/b --gpu-memory-utilization=0.8": {"memory_utilization": 0.8},
    "vllm serve a/b --kv-cache-memory-bytes 4GiB": {"kv_cache_bytes": 4 << 30},
    "vllm serve a/b --swap-space 4": {"swap_space_gib": 4.0},
    "vllm serve a/b --block-size 16": {"page_size": 16},
    "vllm serve a/b --num-gpu-blocks-override 512": {"num_pages": 512},
    "vllm serve a/b --max-num-seqs 64 --max-num-batched-tokens 4096": {"max_num_batched_tokens": 4096},
    "vllm serve a/b --num-scheduler-steps 8": {"multi_step": 8},
    "vllm serve a/b --enable-chunked-prefill": {"prefill_sizes": None},
    "vllm serve a/b --enable-chunked-prefill=True --max-num-seqs 4": {"max_num_seqs": 4},
    "vllm serve --enable-chunked-prefill a/b": {"model": "a/b"},
    "vllm serve a/b --quantization awq": {"quantization": "awq"},
    "vllm serve a/b -q fp8": {"quantization": "fp8"},
    "vllm serve a/b --quantization bitsandbytes --load-format auto": {"quantization": "bitsandbytes"},
    "vllm serve a/b --load-in-4bit": {"quantization": "nf4"},
    "llama-cli -m a/b --load-in-8bit": {"quantization": "int8"},
    "vllm serve a/b --enable-prefix-caching": {"enable_prefix_caching": True},
    "vllm serve a/b --no-enable-prefix-caching": {"enable_prefix_caching": False},
    "vllm serve a/b --use-v2-block-manager": {"model": "a/b"},
    "vllm serve a/b --disable-log-stats": {"log_requests": True},
    "vllm serve a/b --disable-log-requests": {"log_requests": False},
    "vllm serve a/b --enable-log-requests": {"log_requests": True},
    "vllm serve a/b --disable-uvicorn-access-log": {"log_requests": False},
    "vllm serve a/b --uvicorn-log-level warning": {"log_level": "warning"},
    "vllm serve a/b --trust-remote-code": {"model": "a/b"},
    "vllm serve --trust-remote-code a/b": {"model": "a/b"},
    "vllm serve a/b --enforce-eager": {"model": "a/b"},
    "vllm serve a/b --load-format safetensors": {"model": "a/b"},
    "vllm serve a/b --tokenizer-mode auto --config-format hf": {"model": "a/b"},
    "vllm serve a/b --served-model-name mine": {"served_model_name": "mine"},
    "vllm serve a/b --seed 42": {"seed": 42},
    "vllm serve a/b --kv-cache-dtype fp8": {"kv_cache_dtype": "fp8"},
    "vllm serve a/b --cpu-offload-gb 10": {"weight_offload_gib": 10.0},
    "vllm serve a/b --tensor-parallel-size auto": {"tensor_parallel_size": 0},
    "vllm serve a/b --generation-config auto": {"model": "a/b"},
    "vllm serve a/b --task generate": {"model": "a/b"},
    "vllm serve a/b --enable-auto-tool-choice --tool-call-parser hermes": {"tool_call_parser": "hermes"},
    "vllm serve a/b --enable-reasoning --reasoning-parser deepseek_r1": {"reasoning_parser": "deepseek_r1"},
    "vllm serve a/b --chat-template-content-format auto": {"model": "a/b"},
    "vllm serve a/b --guided-decoding-backend xgrammar": {"model": "a/b"},
    "vllm serve a/b --limit-mm-per-prompt image=4": {"limit_mm_per_prompt": ("image=4",)},
    """vllm serve a/b --limit-mm-per-prompt '{"image": 2}'""": {"limit_mm_per_prompt": ('{"image": 2}',)},
    "vllm serve a/b --enable-lora --max-loras 4 --max-lora-rank 32": {"max_loras": 4, "max_lora_rank": 32},
    "vllm serve a/b --enable-lora --lora-modules sql=x/y": {"lora_modules": ("sql=x/y",)},
    "vllm serve a/b --max-logprobs 10": {"max_logprobs": 10},
    "vllm serve a/b --scheduling-policy priority": {"scheduling_policy": "priority"},
    "vllm serve a/b --distributed-executor-backend mp": {"model": "a/b"},
    "vllm serve a/b --preemption-mode recompute": {"model": "a/b"},
    "vllm serve a/b --max-seq-len-to-capture 8192": {"model": "a/b"},
    "vllm serve a/b --disable-custom-all-reduce": {"model": "a/b"},
    "vllm serve a/b --enable-sleep-mode": {"model": "a/b"},
    "vllm serve a/b --ssl-keyfile k.pem --ssl-certfile c.pem": {"tls_key": "k.pem", "tls_cert": "c.pem"},
    "vllm serve a/b --otlp-traces-endpoint http://c:4317": {"otlp_endpoint": "http://c:4317"},
    "vllm serve a/b --model-impl auto": {"family": "auto"},
    "vllm serve a/b --speculative-model a/c --num-speculative-tokens 5": {
        "speculative": "draft_model",
        "speculative_model": "a/c",
        "num_speculative_tokens": 5,
    },
    "vllm serve a/b --speculative-model [ngram] --num-speculative-tokens 5": {"speculative": "ngram"},
    f"vllm serve a/b --speculative-config '{SPECULATIVE}'": {
        "speculative": "eagle3",
        "speculative_model": "a/heads",
        "num_speculative_tokens": 3,
    },
    f"vllm serve a/b --speculative_config '{LOOKUP}'": {"speculative": "ngram", "prompt_lookup_max": 4},
    "python -m vllm.entrypoints.openai.api_server --model a/b --swap-space 8 --disable-log-requests": {
        "model": "a/b",
        "swap_space_gib": 8.0,
        "log_requests": False,
    },
    "vllm chat a/b --max-model-len 1024": {"max_model_len": 1024},
    # SGLang
    "python -m sglang.launch_server --model-path a/b": {"model": "a/b"},
    "python -m sglang.launch_server --model a/b --port 30000": {"http_port": 30000},
    "python -m sglang.launch_server --model-path a/b --tp 8": {"tensor_parallel_size": 8},
    "python -m sglang.launch_server --model-path a/b --tp-size 2 --dp-size 2": {"data_parallel_size": 2},
    "python -m sglang.launch_server --model-path a/b --ep-size 4": {"expert_parallel_size": 4},
    "python -m sglang.launch_server --model-path a/b --mem-fraction-static 0.7": {"memory_utilization": 0.7},
    "python -m sglang.launch_server --model-path a/b --context-length 4096": {"max_model_len": 4096},
    "python -m sglang.launch_server --model-path a/b --max-running-requests 128": {"max_num_seqs": 128},
    "python -m sglang.launch_server --model-path a/b --schedule-policy fcfs": {"scheduling_policy": "fcfs"},
    "python -m sglang.launch_server --model-path a/b --disable-radix-cache": {"enable_prefix_caching": False},
    "python -m sglang.launch_server --model-path a/b --disable-overlap-schedule": {"async_scheduling": False},
    "python -m sglang.launch_server --model-path a/b --disable-cuda-graph": {"model": "a/b"},
    "python -m sglang.launch_server --model-path a/b --cuda-graph-max-bs 64": {"model": "a/b"},
    "python -m sglang.launch_server --model-path a/b --enable-torch-compile": {"model": "a/b"},
    "python -m sglang.launch_server --model-path a/b --enable-mixed-chunk": {"model": "a/b"},
    "python -m sglang.launch_server --model-path a/b --grammar-backend xgrammar": {"model": "a/b"},
    "python -m sglang.launch_server --model-path a/b --sampling-backend flashinfer": {"model": "a/b"},
    "python -m sglang.launch_server --model-path a/b --enable-metrics --log-requests": {"log_requests": True},
    "python -m sglang.launch_server --model-path a/b --random-seed 1": {"seed": 1},
    "python -m sglang.launch_server --model-path a/b --watchdog-timeout 300": {"step_timeout": 300.0},
    "python -m sglang.launch_server --model-path a/b --skip-server-warmup": {"model": "a/b"},
    "python -m sglang.launch_server --model-path a/b --enable-lora --lora-paths a=x/y": {"lora_modules": ("a=x/y",)},
    "python -m sglang.launch_server --model-path a/b --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path a/c --speculative-num-steps 3": {
        "speculative": "eagle3",
        "speculative_model": "a/c",
        "num_speculative_tokens": 3,
    },
    "python -m sglang.launch_server --model-path a/b --speculative-algorithm NEXTN": {"speculative": "mtp"},
    # llama.cpp
    "llama-server -m a/b": {"model": "a/b"},
    "llama-server -m a/b -c 4096": {"max_model_len": 4096},
    "llama-server -m a/b --ctx-size 8192 -ngl 99": {"max_model_len": 8192},
    "llama-server -m a/b --n-gpu-layers 99": {"model": "a/b"},
    "llama-server -m a/b -np 4 -cb": {"max_num_seqs": 4},
    "llama-server -m a/b --parallel 2 --cont-batching": {"max_num_seqs": 2},
    "llama-server -m a/b -fa": {"model": "a/b"},
    "llama-server -m a/b -fa on --port 8080": {"http_port": 8080},
    "llama-server -m a/b --flash-attn auto --jinja": {"model": "a/b"},
    "llama-server -m a/b --mlock --no-mmap": {"model": "a/b"},
    "llama-server -m a/b --alias mine --metrics": {"served_model_name": "mine"},
    "llama-server -m a/b -md a/c --draft-max 8": {"speculative": "draft_model", "num_speculative_tokens": 8},
    "llama-server -m a/b --no-cache-prompt": {"enable_prefix_caching": False},
    "llama-cli -m demo -p Hello --temp 0.7 --top-k 40": {"temperature": 0.7, "top_k": 40, "prompt": ["Hello"]},
    "llama-cli -m demo -p Hi --predict 64 --repeat-penalty 1.1": {"max_tokens": 64, "repetition_penalty": 1.1},
    "llama-cli -m demo -f prompt.txt --n-predict 8 --seed 3": {"prompt_file": "prompt.txt", "seed": 3},
    "llama-cli -m demo -p Hi -c 512 -ngl all": {"max_model_len": 512},
    # TensorRT-LLM
    "trtllm-serve a/b": {"model": "a/b"},
    "trtllm-serve a/b --tp_size 2 --pp_size 2": {"tensor_parallel_size": 2},
    "trtllm-serve a/b --max_batch_size 64": {"max_num_seqs": 64},
    "trtllm-serve a/b --max_num_tokens 8192 --max_seq_len 4096": {"max_num_batched_tokens": 8192},
    "trtllm-serve a/b --kv_cache_free_gpu_memory_fraction 0.9": {"memory_utilization": 0.9},
    "trtllm-serve a/b --trust_remote_code --max_beam_width 1": {"model": "a/b"},
    "trtllm-build a/b --max_batch_size 8 --workers 4": {"max_num_seqs": 8},
    # Benchmarks
    "vllm bench serve --base-url http://localhost:8000 --model a/b": {
        "target": "http://localhost:8000",
        "endpoint": "completions",
    },
    "vllm bench serve --backend vllm --host 10.0.0.1 --port 9000": {"target": "http://10.0.0.1:9000"},
    "vllm bench serve --port 9000 --backend openai-chat --endpoint /v1/chat/completions": {"endpoint": "chat"},
    "vllm bench serve --port 1 --dataset-name random --random-input-len 100 --random-output-len 10": {
        "dataset": "random",
        "input_len": Lengths(100, 100),
        "output_len": Lengths(10, 10),
    },
    "vllm bench serve --port 1 --random-input-len 100 --random-range-ratio 0.5": {"input_len": Lengths(50, 150)},
    "vllm bench serve --port 1 --random-prefix-len 64": {"dataset": "shared-prefix", "prefix_len": 64},
    "vllm bench serve --port 1 --dataset-name sharegpt --dataset-path s.json --sharegpt-output-len 9": {
        "dataset": "sharegpt",
        "output_len": Lengths(9, 9),
    },
    "vllm bench serve --port 1 --num-prompts 500 --request-rate inf": {"num_requests": 500, "request_rate": math.inf},
    "vllm bench serve --port 1 --request-rate inf --max-concurrency 16": {"concurrency": 16, "request_rate": None},
    "vllm bench serve --port 1 --save-result --result-dir r --result-filename x.json": {
        "out": pathlib.Path("r/x.json")
    },
    "vllm bench serve --port 1 --percentile-metrics ttft,tpot --metric-percentiles 50,99": {"goodput": []},
    "vllm bench serve --port 1 --tokenizer a/b --disable-tqdm --num-warmups 2": {"warmup": 2},
    "vllm bench serve --port 1 --goodput ttft:200 tpot:50 --burstiness 0.5 --ignore-eos": {"burstiness": 0.5},
    "vllm bench serve --port 1 --dataset-name sonnet --dataset-path s.txt --sonnet-input-len 9 --sonnet-output-len 8 "
    "--sonnet-prefix-len 4": {"dataset": "sonnet", "input_len": Lengths(9, 9), "prefix_len": 4},
    "vllm bench latency --model a/b --input-len 32 --output-len 8 --batch-size 4": {
        "requests": 4,
        "command": "latency",
    },
    "vllm bench latency --model a/b --num-iters-warmup 2 --num-iters 3 --output-json l.json --n 1": {
        "warmup": 2,
        "iterations": 3,
        "out": pathlib.Path("l.json"),
    },
    "vllm bench latency --model a/b --dtype half --enforce-eager -tp 2 --trust-remote-code": {
        "tensor_parallel_size": 2
    },
    "vllm bench throughput --model a/b --dataset-name sonnet --dataset-path s.txt --num-prompts 9": {"requests": 9},
    "vllm bench throughput --model a/b --backend vllm --input-len 10 --async-engine": {"backends": ["jaxinfer"]},
    "vllm bench throughput --model a/b --backend hf --hf-max-batch-size 4 --tokenizer a/b": {
        "backends": ["jaxinfer", "transformers"],
        "transformers_batch_size": 4,
    },
    "vllm bench throughput --model a/b --random-range-ratio 0.5 --random-input-len 100 --max-num-seqs 4": {
        "input_len": Lengths(50, 150)
    },
    "vllm bench throughput --model a/b --prefix-len 8 --seed 3": {"dataset": "shared-prefix", "seed": 3},
    "vllm serve a/b --profile traces": {"profile_dir": "traces"},
    "python -m sglang.bench_serving --backend sglang --num-prompts 10 --port 30000": {"num_requests": 10},
    "python -m sglang.bench_serving --url http://h:1 --num-prompt 10 --warmup-requests 1": {"warmup": 1},
    "python -m sglang.bench_serving --port 1 --random-input 8 --random-output 8 --output-file o.jsonl": {
        "out": pathlib.Path("o.jsonl")
    },
}
ANSWERED = {
    "vllm serve a/b --quantization fp9": "quantization = fp9",
    "vllm serve a/b --api-key secret": "jaxinfer keys new",
    "vllm serve a/b --no-enable-chunked-prefill": "prefill_sizes",
    "vllm serve a/b --tp few": "neither a number nor auto",
    "vllm serve a/b --tokenizer a/c": "tokenizer",
    "vllm serve a/b --revision main": "hf download",
    "vllm serve a/b --download-dir /data": "HF_HOME",
    "vllm serve a/b --load-format dummy": "load_format",
    """vllm serve a/b --rope-scaling '{"type": "linear"}'""": "config.json",
    """vllm serve a/b --hf-overrides '{}'""": "config.json",
    "vllm serve a/b --enable-expert-parallel": "expert_parallel_size",
    "vllm serve a/b --task embed": "embeddings",
    """vllm serve a/b --speculative-config '{"method": "ngram", "draft_tp": 2}'""": "speculative_config.draft_tp",
    "vllm serve a/b --speculative-config ngram": "speculative_config",
    "vllm serve a/b --port 1 --http-port 2": "--http-port",
    "vllm serve a/b --gpu-memory-utilization 0.9 --memory-utilization 0.8": "--memory-utilization",
    "vllm serve a/b --disable-radix-cache --cache-prompt --block-size 3": "page_size",
    "vllm serve a/b --max-model-length 5": "--max-model-len",
    "python -m sglang.launch_server --model-path a/b --chunked-prefill-size 4096": "max_num_batched_tokens",
    "python -m sglang.launch_server --model-path a/b --max-total-tokens 9000": "kv_cache_bytes",
    "python -m sglang.launch_server --model-path a/b --is-embedding": "embeddings",
    "python -m sglang.launch_server --model-path a/b --speculative-eagle-topk 4": "speculative_tree",
    "llama-server -m a/b -ctk q8_0": "kv_cache_dtype",
    "llama-server -m a/b -t 8": "taskset",
    "llama-server -m a/b -b 512": "max_num_batched_tokens",
    "llama-server -m a/b --embedding": "embeddings",
    "llama-server -m a/b --device-map sequential": "tensor_parallel_size",
    "trtllm-build a/b --max_input_len 1024": "max_model_len",
    "trtllm-serve a/b --extra_llm_api_options c.yaml": "config",
    "trtllm-serve a/b --backend pytorch": "backend",
    "trtllm-serve a/b --max_beam_width 4": "beam",
    "vllm bench serve --port 1 --base-url http://h:2": "--port",
    "vllm bench serve --port 1 --request-rate 4 --max-concurrency 2": "--concurrency",
    "vllm bench serve --port 1 --random-range-ratio 1": "--random-range-ratio",
    "vllm bench latency --model a/b --n 2": "more requests",
    "vllm bench latency --model a/b --use-beam-search": "beam",
    "vllm bench latency --model a/b --disable-detokenize": "text",
    "vllm bench latency --model a/b --profile": "jaxinfer serve --profile",
    "vllm bench throughput --model a/b --backend mii": "transformers",
    "vllm bench throughput --model a/b --num-iter 3": "--num-iters",
}


def parsed(line: str) -> dict[str, Any]:
    """Parse a line by our command of the same purpose; return all settings that it has."""
    command = max((each for each in PARSERS if line.startswith(each)), key=len)
    parser = PARSERS[command]
    args = vars(parser.parse(shlex.split(line.removeprefix(command))))
    config = args.get("configuration")
    found = {} if config is None else {**dataclasses.asdict(config), **dataclasses.asdict(config.engine)}
    return {**args, **args.get("settings", {}), **args.get("sampling", {}), **found}


def test_there_are_enough_lines():
    assert len(RUN) + len(ANSWERED) >= 160


@pytest.mark.parametrize("line", RUN)
def test_the_line_runs(line):
    found = parsed(line)
    assert {name: found[name] for name in RUN[line]} == RUN[line]


@pytest.mark.parametrize("line", ANSWERED)
def test_the_line_is_answered(line, capsys):
    with pytest.raises(SystemExit) as left:
        parsed(line)
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert said.count("\n") == 1
    assert ANSWERED[line] in said


def test_all_names_of_options_of_benchmarks_are_typed():
    lines = "\n".join([*RUN, *ANSWERED])
    ours = {action.dest for action in options.make_parser()._actions} & ALIASES.keys() - {"model"}
    ours |= {"iterations", "transformers_batch_size", "out"}
    names = [name for each in ours for name in ALIASES[each] if name != "p"]
    assert [name for name in names if f"--{name.replace('_', '-')} " not in lines] == []


def test_one_name_has_one_meaning():
    names = [name for aliases in ALIASES.values() for name in aliases]
    names += [*SWITCHES, *ALWAYS, *HINTS]
    assert sorted(names) == sorted(set(names))
