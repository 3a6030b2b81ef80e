"""`docs/original.md` leaves nothing out of PatrickStar 0.4.6, and claims nothing of this project that is not so.

The inventory below was read off the original's sources at its tag v0.4.6: the package's public names, `examples/parse_args.py`,
`examples/run_transformers.sh`, `examples/model_builder.py`, and the files of examples, tools and documentation.
"""

import re

import pytest

import patrickstar
import patrickstar.parallel
from patrickstar.cli.main import cli
from patrickstar.cli.models import MODELS
from patrickstar.config.arguments import check_arguments
from patrickstar.config.engine.table import IGNORED, TABLE
from patrickstar.errors import ConfigError
from tests.docs.pages import ROOT, split

PAGE = (ROOT / "docs" / "original.md").read_text()
KEYS_PAGE = (ROOT / "docs" / "deepspeed.md").read_text()
REFERENCE = (ROOT / "docs" / "reference.md").read_text()

PYTHON = """
initialize_engine PatrickStarEngine FP16Adam PatrickStarClient TensorState ChunkState PSPreProcessCtx torch_scope RuntimeMemTracer
register_torch_profiler_hook profiler global_timer my_timer data_move_cnter see_memory_usage get_ps_model_size estimate_bert_mac
logger log_dist print_rank get_rank get_world_size get_local_world_size
"""
KEYS = """
optimizer.type optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay optimizer.params.use_hybrid_adam
fp16.enabled fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale
gradient_clipping default_chunk_size release_after_init use_cpu_embedding use_fake_dist
client.mem_tracer.use_async_mem_monitor client.mem_tracer.warmup_gpu_chunk_mem_ratio client.mem_tracer.overall_gpu_mem_ratio
client.mem_tracer.overall_cpu_mem_ratio client.mem_tracer.margin_use_ratio client.mem_tracer.use_fake_dist client.mem_tracer.with_static_partition
client.opts.with_mem_saving_comm client.opts.with_mem_cache client.opts.with_async_move client.nvme_base_dir
"""
FLAGS = """
--use_fake_dist --default_chunk_size --use_cpu_embedding --release_after_init --use_hybrid_adam --with_static_partition --with_mem_profiler
--init_loss_scale_power --with_async_mem_monitor --with_mem_saving_comm --with_mem_cache --with_async_move --slog_file --use_ckp
--with_activation_offload --with_tiling_linear --batch_size --local_rank --res_check --use_fp16 --dist_plan --model_name --model_type --with_lightseq
"""
ENVIRONMENT = """
GPU_NUM CS BS CPU_EBD RELEASE_AFTER_INIT MODEL_NAME MODEL_TYPE DIST_PLAN RES_CHECK ACT_OFFLOAD CKP NO_RETRY SKIP_LOG_EXSIT SP MEM_PROF AMM MSC CACHE
ASYNC_MOVE TILING HYB LOCAL_WORLD_SIZE CS_SEARCH NNODES NODE_RANK MASTER_ADDR MASTER_PORT SUFFIX
"""
FILES = """
parse_args.py run_transformers.sh model_builder.py simple_net.py train_simple_net.py huggingface_bert.py imdb_dataset.py pretrain_demo.py ps_config.py
data_loader.py moe/ eval_chunk_size.py optimizations/checkpoint.py optimizations/tiling.py ps_tile_modeling_bert.py test_tiling.py
optimizations/ls_hf_transformer_encoder_layer.py process_logs.py generate_res_table.py is_run_this_file.py tools/profile_visualizer.py
tools/merge_checkpoint.py unitest/ README GUIDE INSIDE CHANGE_LOG doc/optimization_options.md doc/yard_network_fabric.md setup.py op_builder/
"""
# Name: hidden size and layers; positions where they are not 1024.
SHAPES = """
Bert:768x6x512 Bertlarge:1024x24x512 GPT2small:1536x24x128 GPT2_1B:2048x20 megatron_1.3B:2048x24 GPT2_2B:2048x40 megatron_3.9B:2560x24
GPT2_4B:2304x64 GPT3_6B:3072x53 GPT3_8B:3072x72 GPT3_10B:4096x50 GPT3_11B:4096x55 GPT3_12B:4096x60 GPT3_13B:4096x65 GPT3_15B:4096x78
GPT3_18B:4096x90 GPT_NV_18B:6144x40 GPT_NV_39B:8192x48 GPT_NV_76B:10240x60 GPT_DS_20B:8192x25 GPT_DS_40B:8192x50 GPT_DS_50B:8192x62
GPT_DS_60B:8192x75 GPT_DS_68B:9216x66 GPT_175B:12288x96 GPT_220B:12288x120 GPT_250B:12288x137 GPT_310B:16384x128 GPT_454B:20480x90
"""


def code_of(text: str) -> set[str]:
    """What stands in backticks, blocks aside, and the words of it."""
    spans = [span for _, line in split(text)[1] for span in re.findall(r"`([^`]+)`", line)]
    return {part for span in spans for part in (span, *re.findall(r"[\w.\-/]+", span))}


@pytest.mark.parametrize("names", [PYTHON, FLAGS, ENVIRONMENT, FILES, re.sub(r":\S+", "", SHAPES)])
def test_everything_that_there_was_is_named(names):
    named = code_of(PAGE)
    missing = [
        name for name in names.split() if name not in named and not any(span.endswith(f"/{name}") for span in named)
    ]
    assert not missing


def test_every_key_is_in_the_table_that_reads_configs_and_on_its_page():
    keys = KEYS.split()
    assert not [key for key in keys if key not in TABLE and key.rpartition(".")[2] not in IGNORED]
    named = code_of(KEYS_PAGE)
    assert not [key for key in keys if key not in named and key.rpartition(".")[2] not in named]


def test_every_model_is_known_with_its_shape():
    known = {name: MODELS[name] for name in MODELS if not name.islower()}
    told = [f"{name}:{one.hidden}x{one.layers}x{one.positions}".removesuffix("x1024") for name, one in known.items()]
    assert told == SHAPES.split()


def test_every_row_says_in_one_of_the_pages_words_what_became_of_it():
    words = ("**here**", "**otherwise**", "**not needed**", "**to come**")
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    judged = [section for section in sections if section.startswith(("Python", "Flags", "Environment", "Examples"))]
    assert len(judged) == 4
    rows = [row for section in judged for row in section.splitlines() if row.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| there", "| flag", "| variable"))]
    assert len(rows) > 50
    assert not [row for row in rows if not any(word in row for word in words)]


# what the page says of this project


def test_what_it_names_of_this_project_is_there():
    spans = set(re.findall(r"`([^`]+)`", PAGE))
    attributes = {found[1] for span in spans for found in re.finditer(r"\bsession\.(\w+)", span)}
    documented = set(re.findall(r"^### session\.(\w+)$", REFERENCE, re.MULTILINE))
    assert {"plan", "trace", "layout"} <= attributes <= documented
    names = {found[1] for span in spans for found in re.finditer(r"\bpatrickstar\.(\w+)", span)}
    assert {"LossScale", "deferred_init"} <= names <= set(patrickstar.__all__)
    options = {found[1] for span in spans for found in re.finditer(r"\bOptions\((\w+)=", span)}
    assert options <= set(patrickstar.Options.__dataclass_fields__)
    makefile = (ROOT / "Makefile").read_text()
    targets = {found[1] for span in spans for found in re.finditer(r"\bmake (\S+)", span)}
    assert targets == {"bench-step"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    files = {span for span in spans if re.fullmatch(r"(benchmarks|docs|tests)/[\w./]*", span)}
    assert files
    assert not [file for file in files if not (ROOT / file).exists()]


def test_the_flags_it_names_of_this_project_are_there():
    train = cli.get_command(None, "train")
    known = {option for parameter in train.params for option in parameter.opts}
    # Flags of the original are written with underscores, ours with hyphens.
    ours = set(re.findall(r"--[a-z][a-z-]+(?![\w-])", PAGE)) - set(FLAGS.split()) - {"--variant"}
    assert {"--compare-plain", "--log-json", "--device-memory"} <= ours
    assert not ours - known


def is_taken(**arguments):
    try:
        check_arguments(**arguments)
    except ConfigError as refusal:
        assert "arrives in a later version" in str(refusal), refusal
        return False
    return True


# Words for a thing, and whether it is there.
THINGS = {
    "Expert parallelism": lambda: hasattr(patrickstar.parallel, "ExpertParallel"),
    r"\branks?\b": lambda: any("--world" in option.opts for option in cli.get_command(None, "plan").params),
    "recompute": lambda: is_taken(activations="recompute"),
    "offload": lambda: is_taken(activations="plan"),
    "timeline": lambda: hasattr(patrickstar.Session, "timeline") or "timeline" in cli.list_commands(None),
    r"\bCUDA\b|\bGPUs?\b": lambda: is_taken(device="cuda"),
    "overlap|async|one after another": lambda: is_taken(options=patrickstar.Options(prefetch=1)),
    "tiling|tiles": lambda: is_taken(options=patrickstar.Options(tile_rows=1)),
}


def test_what_it_says_is_to_come_is_not_there_yet():
    told = [line for line in PAGE.splitlines() if "to come" in line and not line.startswith("- **to come**")]
    assert len(told) > 7
    for line in told:
        clauses = [clause for clause in re.split(r"[.;|] ", line) if "to come" in clause]
        things = things_in(*clauses) or things_in(line)
        assert things, f"nobody asks whether this has come: {line}"
        assert not any(is_there() for is_there in things), line


def things_in(*texts):
    return [is_there for words, is_there in THINGS.items() for text in texts if re.search(words, text, re.IGNORECASE)]
