"""Faults in what goes over the ranks that share sequences: attention, losses, gradients, batches, and the counter of bytes."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import drop, never, replace, without

ATTENTION = "tests/parallel/test_attention.py"
OF_TWO = f"{ATTENTION}::test_attention_over_ranks_is_that_of_one[2 ranks]"
OF_FOUR = f"{ATTENTION}::test_attention_over_ranks_is_that_of_one[4 ranks]"
BYTES = f"{ATTENTION}::test_bytes_sent_and_kept_are_those_of_the_formulas[2 ranks]"
MODELS = "tests/parallel/test_models.py"
MODEL = f"{MODELS}::test_models_over_ranks_are_those_of_one"
REFUSED = f"{MODELS}::test_what_is_not_right_is_refused_before_anything_is_sent"
COUNTED = "tests/parallel/test_traffic.py::test_bytes_are_those_of_the_formulas[2]"
HOPS = "tests/session/test_long_sequences.py"
BACKWARD = "parallel.ring:_RingAttention.backward"

LONG_SEQUENCES: tuple[Mutant, ...] = (
    Fault("gradients of keys are divided by the number of ranks", BACKWARD).by(
        replace("home.to(k.dtype)", "_ / ring.group.size"), OF_TWO
    ),
    Fault(
        "gradients are averaged over ranks that share sequences",
        "parallel.context_parallel:ContextParallel.reduce_gradients",
    ).by(replace("self._gradient_scale", "self.size"), f"{MODEL}[2 ranks-gpt2-plain]"),
    Fault("a loss is the mean over a rank's own tokens", "parallel.token_losses:_Whole.forward").by(
        replace("group.sum", "(lambda *own: own)"), f"{MODEL}[2 ranks-gpt2-plain]"
    ),
    Fault("a row that sees nothing in a block has log-sum-exp 0", "parallel.kernels:attend").by(
        drop("lse = lse.masked_fill(~mask.any(-1), -math.inf)"), OF_FOUR
    ),
    Fault("keys travel a hop too few", "parallel.ring:travel").by(
        replace("step < group.size - 1", "step < group.size - 2"), OF_FOUR
    ),
    Fault("keys of the first hop are used again in backward", BACKWARD).by(
        replace("unpacked(pair, k, v)", "(k, v)"), OF_TWO
    ),
    Fault("the other half of a rank's own block is left out", BACKWARD).by(
        replace("ring.layout.halves(q.shape[2], is_causal=ring.is_causal)", "(_[0], [])"), OF_TWO
    ),
    Fault("half of a rank's own tokens see what comes after them", "parallel.layouts:TokenLayout.halves").by(
        replace("SeenBlock(late, late, is_causal=True)", "SeenBlock(late, late)"),
        f"{ATTENTION}::test_the_two_parts_of_a_ranks_own_block_have_each_pair_once[5-True]",
    ),
    Fault("who waits in a hop looks at nobody", "parallel.group:MeshGroup._has_ended").by(
        drop("for look in self.looks: ..."),
        f"{HOPS}::test_what_ends_a_rank_in_a_hop_is_an_error_on_all_that_names_it_and_the_layer[stalls-was at collective]",
    ),
    Fault("labels are shifted after the cut", "parallel.cut_batches:cut").by(
        replace(
            "parts = {name: of_rank(tensor) for name, tensor in whole.items()}",
            "parts = {name: of_rank(tensor) for name, tensor in whole.items()}\n"
            "if 'labels' in parts:\n    parts['shift_labels'] = F.pad(parts['labels'], (0, 1), value=IGNORED)[:, 1:]",
        ),
        f"{MODEL}[2 ranks-gpt2-plain]",
    ),
    Fault("a rank's own segments are written over by a hop", "parallel.ring:_present").by(
        replace("segments.clone()", "segments"), OF_FOUR
    ),
    Fault("queries whose rows are not dense are handed to the kernel", "parallel.ring:Ring.__call__").by(
        never("query.stride(-1) != 1"), OF_TWO
    ),
    Fault("sums of gradients travel in sixteen bits", BACKWARD).by(replace("sum_dtype(q.dtype)", "q.dtype"), BYTES),
    Fault("gradients of keys end a rank before home", BACKWARD).by(
        replace("home += moving.wait()[0]", "moving.wait()"), OF_TWO
    ),
    Fault("a zigzag sees the late half of what comes before", "parallel.layouts:TokenLayout.block").by(
        replace("slice(local // 2)", "slice(local // 2, None)"), OF_TWO
    ),
    Fault("strips of exact softmax see what comes later on other ranks", "parallel.strips:StripAttention.forward").by(
        without("strips.group.rank * local"), OF_TWO
    ),
    Fault("key heads are copied in another order", "parallel.swapped_heads:SwappedHeads.__call__").by(
        replace("key.repeat_interleave(copies, 1)", "key.repeat(1, copies, 1, 1)"), OF_FOUR
    ),
    Fault("padding is no segment of its own", "parallel.cut_batches:_segments").by(
        replace("_padded(segments, pad, 0)", "_padded(segments, pad, 1)"), f"{MODEL}[2 ranks-bert-odd]"
    ),
    Fault(
        "a loss that a model makes itself is let through", "parallel.transformer_models:Parallelized._after_forward"
    ).by(never("_has_made_loss"), REFUSED),
    Fault("a batch that is not cut is let through", "parallel.transformer_models:Parallelized._before_forward").by(
        never('"position_ids" not in given'), REFUSED
    ),
    Fault("what a rank sends itself is counted", "parallel.traffic_counter:_all_to_all").by(
        replace("nbytes - own", "nbytes"), COUNTED
    ),
)
