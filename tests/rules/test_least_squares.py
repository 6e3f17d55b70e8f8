"""Tests of least squares over Gram matrices, against the rows themselves."""

from itertools import combinations

import pytest
import torch

from grapnet.errors import GrapNetError
from grapnet.rules._least_squares import (
    DAMPINGS,
    choose_damping,
    column_subset,
    error_of,
    obs_sweep,
    repaired,
)


def rows_of(count: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Returns rows with a constant 1 at their end, whose columns are not independent."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(count, columns, generator=generator, dtype=torch.float64)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    h = (h + 0.5 * h @ mix / columns**0.5).relu()
    return torch.cat([h, h.new_ones(count, 1)], 1)


def weights_of(children: int, columns: int, seed: int = 1) -> torch.Tensor:
    """Returns weights with a bias column."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(children, columns + 1, generator=generator, dtype=torch.float64)


def bits(shape: tuple[int, ...], share: float, seed: int) -> torch.Tensor:
    """Returns random cells, none of them the bias."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.rand(shape, generator=generator) < share
    found[..., -1] = False
    return found


def solved(rows: torch.Tensor, missing: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
    """Returns the change of some columns that comes closest to what is missing, [columns]."""
    found = torch.zeros(rows.shape[1], dtype=torch.float64)
    if bool(free.any()):
        found[free] = torch.linalg.lstsq(rows[:, free], rows @ missing, driver="gelsd").solution
    return found


class TestRepaired:
    def test_equals_least_squares_over_the_rows(self):
        rows = rows_of(400, 12)
        weights = weights_of(5, 12)
        leaving = bits((13,), 0.5, 2)
        found = repaired(weights, rows.t() @ rows, leaving, 0.0)
        target = rows @ weights.t()
        stays = ~leaving
        expected = torch.linalg.lstsq(rows[:, stays], target).solution.t()
        torch.testing.assert_close(found[:, stays], expected, atol=1e-8, rtol=1e-8)
        assert not found[:, leaving].any()

    def test_damping_is_a_penalty_on_the_change_of_all_but_the_bias(self):
        rows = rows_of(60, 8)
        weights = weights_of(3, 8)
        gram = rows.t() @ rows
        leaving = bits((9,), 0.5, 3)
        stays = ~leaving
        found = repaired(weights, gram, leaving, 0.3)
        # The penalty as further rows, which ask every change to be 0.
        root = (0.3 * gram.diagonal()[:-1].mean()).sqrt() * torch.eye(9, dtype=torch.float64)
        root[-1] = 0
        longer = torch.cat([rows[:, stays], root[:, stays]])
        missing = torch.cat(
            [rows[:, leaving] @ weights[:, leaving].t(), torch.zeros(9, 3, dtype=torch.float64)]
        )
        change = torch.linalg.lstsq(longer, missing).solution.t()
        expected = weights[:, stays] + change
        torch.testing.assert_close(found[:, stays], expected, atol=1e-8, rtol=1e-8)

    def test_solves_every_child_over_its_own_cells(self):
        rows = rows_of(300, 10)
        absent = bits((6, 11), 0.3, 4)
        absent[2, -1] = True
        frozen = bits((6, 11), 0.3, 5) & ~absent
        frozen[3, -1] = True
        leaving = bits((6, 11), 0.3, 6) & ~absent
        weights = weights_of(6, 10).masked_fill(absent, 0)
        found = repaired(weights, rows.t() @ rows, leaving, 0.0, absent=absent, frozen=frozen)
        for child in range(6):
            free = ~(leaving[child] | absent[child] | frozen[child])
            missing = torch.where(leaving[child], weights[child], 0)
            expected = torch.where(leaving[child], 0, weights[child])
            expected = expected + solved(rows, missing, free)
            torch.testing.assert_close(found[child], expected, atol=1e-8, rtol=1e-8)
        held = frozen & ~leaving
        assert torch.equal(found[held], weights[held])
        assert not found[absent | leaving].any()

    def test_nothing_leaving_changes_nothing_exactly(self):
        rows = rows_of(20, 30)
        weights = weights_of(4, 30)
        leaving = torch.zeros(4, 31, dtype=torch.bool)
        assert torch.equal(repaired(weights, rows.t() @ rows, leaving, 1e-3), weights)
        leaving[2, 5] = True
        found = repaired(weights, rows.t() @ rows, leaving, 1e-3)
        others = torch.tensor([0, 1, 3])
        assert torch.equal(found[others], weights[others])
        assert not torch.equal(found[2], weights[2])

    def test_columns_that_never_fired_keep_their_weights(self):
        rows = rows_of(100, 6)
        rows[:, 2] = 0
        weights = weights_of(3, 6)
        leaving = torch.tensor([True, False, False, False, False, False, False])
        found = repaired(weights, rows.t() @ rows, leaving, 0.0)
        assert torch.equal(found[:, 2], weights[:, 2])

    def test_a_copy_takes_over_the_weights_of_what_it_copies(self):
        rows = rows_of(100, 6)
        rows[:, 4] = rows[:, 1]
        weights = weights_of(3, 6)
        leaving = torch.zeros(7, dtype=torch.bool)
        leaving[4] = True
        expected = weights.clone()
        expected[:, 1] += weights[:, 4]
        expected[:, 4] = 0
        found = repaired(weights, rows.t() @ rows, leaving, 0.0)
        torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)

    def test_refuses_a_matrix_that_is_not_positive_definite(self):
        rows = rows_of(100, 6)
        rows[:, 4] = rows[:, 1] + rows[:, 2]
        weights = weights_of(3, 6)
        leaving = torch.zeros(7, dtype=torch.bool)
        leaving[0] = True
        with pytest.raises(GrapNetError):
            repaired(weights, rows.t() @ rows, leaving, 0.0)
        assert repaired(weights, rows.t() @ rows, leaving, 1e-6).isfinite().all()

    def test_weights_need_as_many_columns_as_the_gram_matrix(self):
        with pytest.raises(ValueError, match=r"[a-z]"):
            repaired(weights_of(3, 6), torch.eye(6), torch.zeros(7, dtype=torch.bool), 0.1)


class TestChooseDamping:
    def test_is_the_one_with_the_smallest_error_on_the_other_rows(self):
        rows = rows_of(25, 20)
        others = rows_of(400, 20, seed=8)
        weights = weights_of(4, 20)
        leaving = bits((21,), 0.4, 9)
        gram = rows.t() @ rows
        chosen = choose_damping(weights, gram, others.t() @ others, leaving)
        errors = []
        for damping in DAMPINGS:
            after = repaired(weights, gram, leaving, damping)
            errors.append(float((others @ (after - weights).t()).square().sum()))
        assert DAMPINGS[errors.index(min(errors))] == chosen
        # The rows that were solved for would always choose the smallest.
        assert choose_damping(weights, gram, gram, leaving) == DAMPINGS[0] != chosen

    def test_the_error_is_that_of_the_rows(self):
        rows = rows_of(30, 5)
        change = weights_of(3, 5)
        expected = float((rows @ change.t()).square().sum())
        assert error_of(change, rows.t() @ rows) == pytest.approx(expected, rel=1e-12)

    def test_raises_where_no_damping_helps(self):
        gram = torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).double()
        leaving = torch.tensor([False, False, False])
        with pytest.raises(GrapNetError):
            choose_damping(
                torch.ones(1, 3), gram, gram, torch.tensor([True, False, False]), grid=(-2.0,)
            )
        assert choose_damping(torch.ones(1, 3), gram, gram, leaving) == DAMPINGS[-1]


def surgeon(
    weights: torch.Tensor, gram: torch.Tensor, leaving: torch.Tensor, frozen: torch.Tensor
) -> torch.Tensor:
    """Lets the cells of one child leave from left to right; after each, all columns behind it are
    solved for again, explicitly.
    """
    found = weights.clone()
    n = len(weights)
    for column in range(n):
        wanted = float(found[column])
        if leaving[column]:
            wanted = 0.0
        elif frozen[column]:
            wanted = float(weights[column])
        change = wanted - float(found[column])
        behind = torch.arange(column + 1, n)
        found[column] = wanted
        if len(behind):
            system = gram[behind][:, behind]
            found[behind] -= torch.linalg.solve(system, gram[behind, column]) * change
    return found


class TestObsSweep:
    @pytest.mark.parametrize("block", [1, 3, 128])
    def test_compensates_like_solving_again_after_every_column(self, block: int):
        rows = rows_of(200, 9)
        gram = rows.t() @ rows
        weights = weights_of(4, 9)
        leaving = bits((4, 10), 0.5, 3)
        frozen = bits((4, 10), 0.3, 4) & ~leaving
        kept, found = obs_sweep(
            weights, gram, leaving=leaving, frozen=frozen, block=block, damping=0.0
        )
        assert torch.equal(kept, ~leaving)
        for child in range(4):
            expected = surgeon(weights[child], gram, leaving[child], frozen[child])
            torch.testing.assert_close(found[child], expected, atol=1e-8, rtol=1e-8)
        assert torch.equal(found[frozen], weights[frozen])

    def test_scores_are_what_the_next_cell_costs(self):
        rows = rows_of(200, 6)
        gram = rows.t() @ rows
        weights = weights_of(1, 6)
        # Of the first column, the score is the error after all others were solved for.
        leaving = torch.zeros(7, dtype=torch.bool)
        leaving[0] = True
        cost = error_of(repaired(weights, gram, leaving, 0.0) - weights, gram)
        kept, _ = obs_sweep(weights, gram, threshold=cost * 1.001, damping=0.0, block=1)
        assert not kept[0, 0]
        kept, _ = obs_sweep(weights, gram, threshold=cost * 0.999, damping=0.0, block=1)
        assert kept[0, 0]

    def test_one_cell_is_the_best_of_all(self):
        # With independent columns the scores of one sweep are those of every single cell.
        rows = torch.cat([torch.eye(5), torch.ones(0, 5)]).double()
        gram = rows.t() @ rows * torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0]).double()
        weights = torch.tensor([[1.0, 1.5, 1.2, -0.7, 2.0]]).double()
        costs = []
        for column in range(4):
            leaving = torch.zeros(5, dtype=torch.bool)
            leaving[column] = True
            costs.append(error_of(repaired(weights, gram, leaving, 0.0) - weights, gram))
        kept, _ = obs_sweep(weights, gram, count=1, damping=0.0)
        assert kept.tolist() == [[column != costs.index(min(costs)) for column in range(5)]]

    def test_is_close_to_the_best_of_all_choices(self):
        rows = rows_of(300, 6)
        gram = rows.t() @ rows
        errors = {"best": 0.0, "sweep": 0.0, "random": 0.0}
        for seed in range(10):
            weights = weights_of(1, 6, seed)
            every = []
            for choice in combinations(range(6), 3):
                leaving = torch.zeros(7, dtype=torch.bool)
                leaving[list(choice)] = True
                every.append(error_of(repaired(weights, gram, leaving, 0.0) - weights, gram))
            errors["best"] += min(every)
            errors["random"] += sum(every) / len(every)
            kept, _ = obs_sweep(weights, gram, count=3, damping=0.0)
            after = repaired(weights, gram, ~kept, 0.0)
            errors["sweep"] += error_of(after - weights, gram)
        assert errors["best"] <= errors["sweep"] < 1.5 * errors["best"] < 0.5 * errors["random"]

    @pytest.mark.parametrize("spread", ["matrix", "block"])
    def test_counts_are_exact_and_leave_out_what_cannot_be_chosen(self, spread):
        rows = rows_of(200, 20)
        gram = rows.t() @ rows
        weights = weights_of(7, 20)
        absent = bits((7, 21), 0.2, 1)
        frozen = bits((7, 21), 0.2, 2) & ~absent
        settings = {"absent": absent, "frozen": frozen, "block": 6, "spread": spread}
        kept, found = obs_sweep(weights, gram, count=41, **settings)
        assert int((~kept & ~absent).sum()) == 41
        assert bool(kept[frozen].all())
        assert bool(kept[:, -1].all())
        assert torch.equal(found[frozen], weights[frozen])
        assert torch.equal(found != 0, kept)
        each = torch.tensor([0, 1, 2, 3, 4, 5, 6])
        kept, _ = obs_sweep(weights, gram, count=each, **settings)
        assert torch.equal((~kept & ~absent).sum(1), each)

    def test_shares_are_rounded_down(self):
        rows = rows_of(200, 20)
        gram = rows.t() @ rows
        weights = weights_of(3, 20)
        kept, _ = obs_sweep(weights, gram, share=0.33)
        assert int((~kept).sum()) == 19
        kept, _ = obs_sweep(weights, gram, share=0.33, block=7, spread="block")
        assert (~kept)[:, :7].sum() == 6

    def test_too_many_cells_cannot_leave(self):
        gram = rows_of(50, 4).t() @ rows_of(50, 4)
        with pytest.raises(ValueError, match=r"[a-z]"):
            obs_sweep(weights_of(2, 4), gram, count=9)

    def test_exactly_one_choice_is_given(self):
        gram = torch.eye(5).double()
        with pytest.raises(ValueError, match=r"[a-z]"):
            obs_sweep(weights_of(2, 4), gram)
        with pytest.raises(ValueError, match=r"[a-z]"):
            obs_sweep(weights_of(2, 4), gram, count=1, pattern=(2, 4))

    def test_patterns_keep_n_of_m_and_what_is_frozen(self):
        rows = rows_of(200, 16)
        gram = rows.t() @ rows
        weights = weights_of(5, 16)
        kept, found = obs_sweep(weights, gram, pattern=(2, 4), block=8)
        groups = kept[:, :16].view(5, 4, 4)
        assert bool((groups.sum(2) == 2).all())
        assert torch.equal(found != 0, kept)
        absent = bits((5, 17), 0.3, 3)
        frozen = bits((5, 17), 0.2, 4) & ~absent
        kept, _ = obs_sweep(weights, gram, pattern=(2, 4), absent=absent, frozen=frozen)
        staying = kept[:, :16].view(5, 4, 4).sum(2)
        present = (~absent)[:, :16].view(5, 4, 4).sum(2)
        held = frozen[:, :16].view(5, 4, 4).sum(2)
        assert torch.equal(staying, torch.maximum(present.clamp(max=2), held))
        with pytest.raises(ValueError, match=r"[a-z]"):
            obs_sweep(weights_of(2, 6), torch.eye(7).double(), pattern=(2, 4))

    def test_published_settings_let_one_cell_more_leave_in_every_block(self):
        rows = rows_of(200, 32)[:, :-1].float()
        rows[:, 5] = 0
        gram = rows.t() @ rows
        weights = weights_of(6, 32)[:, :-1].float()
        kept, found = obs_sweep(
            weights, gram, share=0.5, bias=False, block=8, spread="block", published=True
        )
        out = (~kept).view(6, 4, 8).sum((0, 2))
        assert out.tolist() == [25, 25, 25, 25]
        assert found.dtype == torch.float32
        assert not kept[:, 5].any()
        assert torch.equal(found != 0, kept)

    def test_refuses_a_matrix_that_is_not_positive_definite(self):
        rows = rows_of(50, 4)
        rows[:, 2] = rows[:, 1]
        with pytest.raises(GrapNetError):
            obs_sweep(weights_of(2, 4), rows.t() @ rows, count=2, damping=0.0)


def unexplained(rows: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    """Returns the squared part of every column that some columns do not explain."""
    basis = rows[:, chosen]
    rest = rows - basis @ torch.linalg.lstsq(basis, rows).solution
    return rest.square().sum(0)


class TestColumnSubset:
    def test_chooses_the_largest_part_that_others_do_not_explain(self):
        rows = rows_of(200, 12)
        norms = torch.rand(12, generator=torch.Generator().manual_seed(3)).double() + 0.1
        found = column_subset(rows.t() @ rows, norms, 7).tolist()
        chosen = [12]
        for column in found:
            rest = unexplained(rows, chosen)[:12] * norms.square()
            rest[[c for c in chosen if c < 12]] = 0
            assert int(rest.argmax()) == column
            chosen.append(column)

    def test_held_columns_explain_others_and_are_not_chosen(self):
        rows = rows_of(200, 6)
        rows[:, 3] = 2 * rows[:, 0]
        held = torch.zeros(6, dtype=torch.bool)
        held[0] = True
        found = column_subset(rows.t() @ rows, torch.ones(6), 4, held=held).tolist()
        assert sorted(found) == [1, 2, 4, 5]

    def test_what_is_explained_follows_by_size(self):
        rows = rows_of(200, 6)
        rows[:, 3] = 2 * rows[:, 0]
        rows[:, 4] = 0.5
        found = column_subset(rows.t() @ rows, torch.ones(6), 6).tolist()
        assert sorted(found) == list(range(6))
        assert found[4] == 0
        assert found[5] == 4

    def test_without_a_bias_constants_are_chosen(self):
        rows = rows_of(200, 6)[:, :-1]
        rows[:, 4] = 50
        assert column_subset(rows.t() @ rows, torch.ones(6), 1, bias=False).tolist() == [4]
        with_bias = torch.cat([rows, torch.ones(200, 1).double()], 1)
        gram = with_bias.t() @ with_bias
        assert column_subset(gram, torch.ones(6), 5).tolist().count(4) == 0

    def test_more_than_all_cannot_be_chosen(self):
        with pytest.raises(ValueError, match=r"[a-z]"):
            column_subset(torch.eye(4), torch.ones(3), 4)
