"""Faults in products, layers and losses of q x q blocks, and in what of them is on several ranks."""

from __future__ import annotations

from tests.mutants.mutant import Fault, Mutant
from tests.mutants.operators import always, drop, replace, returns, without

HERE = "tests/parallel/test_tensor_2d.py"
PRODUCTS = "tests/parallel/test_summa.py::test_products_gradients_and_theirs_are_those_of_whole_matrices"
SENT = f"{HERE}::test_bytes_are_those_of_the_formulas"
MODELS = f"{HERE}::test_loss_logits_and_gradients_are_those_of_one_process"
GPT2, OWN = f"{MODELS}[gpt2-2]", f"{MODELS}[own-2]"
LOSSES = f"{HERE}::test_a_loss_and_its_gradient_are_those_of_whole_logits"
NORMS = f"{HERE}::test_a_norm_keeps_the_digits_of_a_small_variance"
DROPOUT = f"{HERE}::test_dropout_differs_by_rank_and_forward_and_is_the_same_when_a_block_runs_again"
FAKE = f"{HERE}::test_a_copy_with_fake_tensors_has_shapes_and_sends_nothing"
REFUSED = f"{HERE}::test_bad_input_is_refused_with_its_numbers_before_anything_is_sent"
PANELS = "tests/parallel/test_summa.py::test_no_whole_panel_is_ever_there"
ALONE = "tests/parallel/test_summa.py::test_a_mesh_of_one_rank_changes_no_bit"
COSTS = "tests/parallel/test_costs.py"
MANAGED = "tests/session/test_blocks_2d.py"
TRAINED = f"{MANAGED}::test_blocks_train_as_one_process_with_the_same_bits_under_any_budget[gpt2]"
SAVED = f"{MANAGED}::test_checkpoints_go_from_blocks_to_one_process_and_back[gpt2-1]"
FAILED = f"{MANAGED}::test_what_fails_on_one_rank_in_saving_and_loading_is_an_error_on_all_and_they_go_on"

BLOCKS_2D: tuple[Mutant, ...] = (
    Fault("a panel comes from the wrong column", "parallel.group:MeshGroup.broadcast").by(
        replace("self.members[place]", "self.members[place - 1]"), f"{PRODUCTS}[ab-2]"
    ),
    Fault("a sum goes to the wrong row", "parallel.group:MeshGroup.reduce").by(
        replace("self.members[place]", "self.members[place - 1]"), f"{PRODUCTS}[atb-2]"
    ),
    Fault("the panels of a product are all there at once", "parallel.grid:panels").by(
        replace("sizes[1:3]", "range(2 * len(sizes))"), f"{PANELS}[ab]"
    ),
    Fault("the derivative of A B by B is taken for that of A^T B", "parallel.summa:BlockProduct.backward").by(
        replace("not ctx.transposed", "ctx.transposed"), f"{PRODUCTS}[ab-2]"
    ),
    Fault("of several matrices with one input only the first counts backward", "parallel.summa:_abt").by(
        replace("min(number, 1)", "0"), f"{MODELS}[llama-2]"
    ),
    Fault("each of several layers sends their input", "parallel.layers_2d:SharedInput.output").by(
        always("x is not self._input or layer not in self._outputs"), f"{SENT}[llama-2]"
    ),
    Fault("a column's gradients of vectors are each rank's own", "parallel.layers_2d:Replicated.backward").by(
        replace("ctx.line.sum(gradient)", "(gradient,)"), GPT2
    ),
    Fault("gradients of norms are each rank's own", "parallel.layers_2d:_Norm.backward").by(
        replace("grid.rows.sum(...)", "tuple(v.to(weight.dtype) for v in of_vectors)"), GPT2
    ),
    Fault("a norm is over the features of one column", "parallel.layers_2d:_Norm.forward").by(
        replace("grid.cols.sum(wide.square().sum(-1, keepdim=True))", "(wide.square().sum(-1, keepdim=True),)"),
        f"{MODELS}[llama-2]",
    ),
    Fault("a norm's derivative leaves out other columns", "parallel.layers_2d:_Norm.backward").by(
        replace("grid.cols.sum(*sums)", "sums"), GPT2
    ),
    Fault("squares of a norm are summed in fp32", "parallel.layers_2d:_Norm.forward").by(
        replace("wide.mean(-1, keepdim=True).double()", "wide.mean(-1, keepdim=True)"), NORMS
    ),
    Fault("a padding id has a gradient", "parallel.layers_2d:_Lookup.backward").by(always("padding is None"), OWN),
    Fault("queries, keys and values are cut as one", "parallel.grid:Cut.block").by(
        replace("whole.chunk(self.parts, dim)", "[whole]"), GPT2
    ),
    Fault("queries, keys and values are put together as one", "parallel.grid:Cut.whole").by(
        replace("piece.chunk(self.parts, self.cols)", "[piece]"), GPT2
    ),
    Fault("a loss is the mean of a row of the mesh", "parallel.layers_2d:cross_entropy_of_blocks").by(
        replace("grid.rows", "type(grid.rows)()"), LOSSES
    ),
    Fault("the largest logit is one column's", "parallel.layers_2d:_CrossEntropy.forward").by(
        replace("grid.cols.largest(wide.amax(-1))", "wide.amax(-1)"), LOSSES
    ),
    Fault("a batch without labels divides by 0", "parallel.token_losses:mean_over").by(
        replace("count.clamp_min(1)", "count"), LOSSES
    ),
    Fault("a loss takes labels as they are", "parallel.token_losses:CausalLoss.__call__").by(
        replace("F.pad(...)[..., 1:]", "labels"), GPT2
    ),
    Fault("all ranks drop the same", "parallel.tensor_2d:RandomStreams.before_forward").by(
        replace("self._place.to_bytes(4, 'little')", "b''"), DROPOUT
    ),
    Fault("each forward drops the same", "parallel.tensor_2d:RandomStreams.after_forward").by(drop("rand"), DROPOUT),
    Fault("random states are read as fake tensors", "parallel.tensor_2d:RandomStreams._states").by(
        without("without_modes()"), FAKE
    ),
    Fault("a norm that adds one to its weight is taken for another", "parallel.plans_2d:_is_norm").by(
        returns("True", nth=3), REFUSED
    ),
    Fault("modules may be left out of a plan", "parallel.plans_2d:placed").by(drop("append"), REFUSED),
    Fault("sizes need not divide", "parallel.plans_2d:placed").by(replace("size % q", "False"), REFUSED),
    Fault("one rank cuts its model, too", "parallel.tensor_2d:Tensor2D.parallelize").by(
        drop("if self.size == 1: ..."), ALONE
    ),
    Fault("ranks may cut blocks of different models", "parallel.tensor_2d:_replace").by(
        drop("grid.everyone.agree"), f"{HERE}::test_models_of_different_seeds_are_an_error_on_all_ranks"
    ),
    Fault("a norm counts what a column has alike once a rank", "session.manage:_meet").by(
        always("cuts[name].first(grid.place) == grid.place"), TRAINED
    ),
    Fault("a norm is that of a rank's own blocks", "step.mesh_ranks:MeshRanks.norm").by(
        returns("norm_of(mine)"), TRAINED
    ),
    Fault("an overflow is a block's own", "step.training_deferred:DeferredTraining.overflowed").by(
        replace("self.mesh or self.gathering", "self.gathering"),
        f"{MANAGED}::test_an_overflow_in_one_block_skips_the_step_on_all_ranks",
    ),
    Fault("queries, keys and values are saved as one", "parallel.grid:Cut._pieces").by(
        replace("self.parts if dim == self.cols else 1", "1"), SAVED
    ),
    Fault("what a column has alike is loaded by its first rank", "session.mesh_tensors:MeshTensors.block").by(
        replace("cut.first(self.grid.place)", "self.grid.place", nth=1), SAVED
    ),
    Fault("zeros are written for blocks that cannot be read", "session.delivery:MeshDelivery._kept").by(
        drop("self._problem = error"), FAILED
    ),
    Fault("sums of gradients are counted in 16 bits", "parallel.costs:attention").by(
        replace("max(element, accumulate)", "element"), f"{COSTS}::test_an_attention_sends_what_the_table_says[1-2]"
    ),
)
