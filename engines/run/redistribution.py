"""The device's part of verification lengths: who gets a step's rows, without the host waiting for confidences."""

import torch


def redistribute(confidences: torch.Tensor, remap: torch.Tensor, total_rows: int | torch.Tensor) -> torch.Tensor:
    """Rows of each sequence, int64 [sequences], by the rule of `engines/core/verify/redistribution.py`, to the bit.

    confidences: float32 [previous rows, drafts], raw; remap: integer [sequences], -1 = not in the step before.
    `total_rows` is between one and 1 + drafts rows a sequence, which nobody checks here: its sum is what comes out.
    Everything stays on the device of `confidences`; nothing synchronises, so `total_rows` may be a tensor of it.
    """
    count, drafts = remap.shape[0], confidences.shape[1]
    if not confidences.shape[0]:
        confidences = confidences.new_zeros((1, drafts))  # a row to read for those that were not there
    rates = _products(confidences)[remap.clamp(min=0)]
    flat = torch.where((remap >= 0).unsqueeze(1), rates, 0.0).reshape(-1)
    # Stable, so that equal rates keep their order: the lower flat index comes first.
    order = torch.sort(flat, descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank[order] = torch.arange(count * drafts, device=order.device)
    return 1 + (rank.reshape(count, drafts) < total_rows - count).sum(dim=1)


def _products(confidences: torch.Tensor) -> torch.Tensor:
    """Running products in single precision, one factor after the other: a scan may multiply in another order."""
    columns = [confidences[:, 0]] if confidences.shape[1] else []
    for index in range(1, confidences.shape[1]):
        columns.append(columns[-1] * confidences[:, index])
    return torch.stack(columns, dim=1) if columns else confidences
