"""From hidden vectors to the next patch: noise, flow solve, stop head, slot state."""

from __future__ import annotations

import torch
from torch import Tensor

from models.layers.adapters import Lora
from models.layers.op import op
from models.protocol import State
from models.voxcpm2.network import FlowSolver, VoxCPM2Network


@op(cuda="models.voxcpm2.kernels.step:make_patch")
def make_patch(
    slots: Tensor,
    network: VoxCPM2Network,
    solver: FlowSolver,
    state: State,
    noise: Tensor,
    lm: Tensor,
    residual: Tensor,
    lora: Lora | None = None,
) -> Tensor:
    """TSLM and RALM of the rows [rows, H] each, and noise float32 [rows, D, P] -> results float32 [rows, P * D + 3], as
    models.protocol.SpeechModel.decode_step has them. Writes last_patch, step and active of the slots, which are ready
    for their next step then."""

    def read(name: str) -> Tensor:
        return state[name].index_select(0, slots)

    active, step, previous = read("active"), read("step"), read("last_patch")
    dtype = previous.dtype
    noise = noise.to(dtype) * read("temperature").to(dtype)[:, None, None]
    mu = torch.stack(network.condition(lm, residual, lora), dim=1)
    patch = solver.solve(noise.transpose(1, 2), mu, previous, read("cfg").to(dtype), lora)

    logits = network.stop_logits(lm)
    # A tie continues, as with argmax; so does a stop flag before the minimum length.
    stopped = active & (logits[:, 1] > logits[:, 0]) & (step > read("min_patches"))
    finished = stopped | (active & (step + 1 >= read("max_patches")))
    state["last_patch"].index_copy_(0, slots, torch.where(active[:, None, None], patch, previous))
    state["step"].index_copy_(0, slots, step + active.to(step.dtype))
    state["active"].index_copy_(0, slots, active & ~finished)
    return torch.cat((patch.flatten(1).float(), torch.stack((stopped, finished, active), dim=1).float()), dim=1)
