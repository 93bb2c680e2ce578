"""The networks of VoxCPM2: LocEnc, TSLM, FSQ, RALM, LocDiT with its solver, and the stop head.

P latent frames of D channels make a patch [P, D]; H is the language models' hidden size, h that of the local stacks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.interfaces.rule import Rule
from models.layers.adapters import Lora
from models.layers.attention import cached_attention
from models.layers.block import block_rules
from models.layers.fused import quantize
from models.layers.gemm import gemm, narrow_gemm
from models.layers.kv_cache import CacheSpec, PagedBatch
from models.layers.lora import StackLora
from models.voxcpm2.config import VoxCPM2Config
from models.voxcpm2.solver import Schedule, guided_euler_step, schedule, sinusoid
from models.voxcpm2.stack import LocalStack, Stack, language_block, local_block, longrope_table

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines float32 [n, head_dim / 2]."""


def project(layer: nn.Linear, x: Tensor) -> Tensor:
    """layer(x) by the kernels of models.layers.gemm: [..., K] -> [..., N]."""
    return gemm(x, layer.weight, layer.bias)


class LocalEncoder(nn.Module):
    """LocEnc: the tokens of patches -> one vector each [n, h], read off a special token in front."""

    def __init__(self, config: VoxCPM2Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_proj = nn.Linear(config.feat_dim, config.encoder.hidden_dim)
        self.special_token = nn.Parameter(torch.empty(1, 1, 1, config.encoder.hidden_dim))
        self.encoder = LocalStack(config.encoder, config.lm, 1 + config.patch_size, dtype, slice(0, 1))

    def tokens(self, patches: Tensor) -> Tensor:
        """[n, P, D] -> [n, 1 + P, h]."""
        special = self.special_token[0].expand(patches.shape[0], -1, -1)
        return torch.cat((special, self.in_proj(patches)), dim=1)

    def forward(self, tokens: Tensor, normed: Tensor | None = None) -> Tensor:
        """normed: the tokens after encoder.first_norm, from a caller that has them."""
        return self.encoder(tokens, normed)[:, 0]


class ScalarQuantizer(nn.Module):
    """FSQ between two projections: [n, H] -> [n, H]."""

    def __init__(self, hidden_size: int, latent_size: int, scale: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(hidden_size, latent_size)
        self.out_proj = nn.Linear(latent_size, hidden_size)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return project(self.out_proj, quantize(project(self.in_proj, x), self.scale))


class TimeMLP(nn.Module):
    """Sinusoids of times [n, h] -> [n, h]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(hidden_size, hidden_size)
        self.linear_2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


class LocalDiT(nn.Module):
    """LocDiT: velocity of a noisy patch under [mu_lm, mu_res, time, previous patch (P), patch (P)] as tokens."""

    def __init__(self, config: VoxCPM2Config, dtype: torch.dtype) -> None:
        super().__init__()
        hidden_size, frames = config.dit.hidden_dim, config.patch_size
        self.in_proj = nn.Linear(config.feat_dim, hidden_size)
        self.cond_proj = nn.Linear(config.feat_dim, hidden_size)
        self.out_proj = nn.Linear(hidden_size, config.feat_dim)
        self.time_mlp = TimeMLP(hidden_size)
        self.delta_time_mlp = TimeMLP(hidden_size)
        length = 3 + 2 * frames
        self.decoder = LocalStack(config.dit, config.lm, length, dtype, slice(3 + frames, length))

    def time_embedding(self, times: Tensor) -> Tensor:
        """Times [n], on any device -> [n, h]; the second input of the published network, a step size, is 0."""
        weight = self.time_mlp.linear_1.weight
        waves, still = (sinusoid(t.cpu(), weight.shape[1]).to(weight.device) for t in (times, torch.zeros_like(times)))
        return self.time_mlp(waves) + self.delta_time_mlp(still)

    def velocity(self, tokens: Tensor, normed: Tensor | None = None, lora: StackLora | None = None) -> Tensor:
        """Tokens [n, 3 + 2 P, h] -> [n, P, D]. normed: the tokens after decoder.first_norm, from a caller that has
        them. lora: of n units, or of the consecutive pairs of them."""
        return narrow_gemm(self.decoder(tokens, normed, lora), self.out_proj.weight, self.out_proj.bias)


class FlowSolver:
    """The Euler solve of one number of solver steps. Times are constants, so their embeddings are a table."""

    def __init__(self, dit: LocalDiT, solver_steps: int) -> None:
        weight = dit.in_proj.weight
        self.dit = dit
        self.schedule: Schedule = schedule(solver_steps, weight.dtype)
        self.time_table = dit.time_embedding(torch.tensor(self.schedule.times, dtype=weight.dtype))

    def solve(self, x: Tensor, mu: Tensor, previous: Tensor, cfg: Tensor, lora: Lora | None = None) -> Tensor:
        """Noise x [rows, P, D], mu [rows, 2, h], previous patch [rows, P, D], cfg [rows] -> patch [rows, P, D].

        Conditional and unconditional rows are in one batch; the latter have mu = 0 and keep the previous patch.
        """
        rows, frames = x.shape[:2]
        adapters = None if lora is None else lora.twice().stack("feat_decoder")
        condition = self.dit.cond_proj(previous)
        # Times and patches change from step to step; the initial values in their places do not matter.
        tokens = torch.cat((mu, mu[:, :1], condition, condition), dim=1).repeat(2, 1, 1)
        tokens[rows:, :2] = 0.0
        time_token, patch = tokens[:, 2], tokens.unflatten(0, (2, rows))[:, :, -frames:]
        for time, step_size in zip(self.time_table, self.schedule.step_sizes, strict=True):
            time_token.copy_(time)
            patch.copy_(self.dit.in_proj(x))
            velocity = self.dit.velocity(tokens, lora=adapters)
            x = guided_euler_step(x, velocity, cfg, step_size)
        return x


class VoxCPM2Network(nn.Module):
    """All of model.safetensors. `dtype` is the parameters' dtype: the rotary tables are rounded to it."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: VoxCPM2Config, dtype: torch.dtype) -> None:
        super().__init__()
        lm, hidden_size = config.lm, config.lm.hidden_size
        self.embed_tokens = nn.Embedding(lm.vocab_size, hidden_size)
        self.base_lm = Stack(language_block(lm), lm.num_hidden_layers)
        self.residual_lm = Stack(language_block(lm), config.residual_lm_num_layers)
        self.feat_encoder = LocalEncoder(config, dtype)
        self.feat_decoder = LocalDiT(config, dtype)
        self.fsq_layer = ScalarQuantizer(
            hidden_size, config.scalar_quantization_latent_dim, config.scalar_quantization_scale
        )
        self.enc_to_lm_proj = nn.Linear(config.encoder.hidden_dim, hidden_size)
        self.lm_to_dit_proj = nn.Linear(hidden_size, config.dit.hidden_dim)
        self.res_to_dit_proj = nn.Linear(hidden_size, config.dit.hidden_dim)
        self.fusion_concat_proj = nn.Linear(2 * hidden_size, hidden_size)
        self.stop_proj = nn.Linear(hidden_size, hidden_size)
        self.stop_head = nn.Linear(hidden_size, 2, bias=False)
        cos, sin = longrope_table(lm, config.max_length, dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def cache_specs(self) -> list[CacheSpec]:
        """Layers of the TSLM, then those of the RALM."""
        layers = [*self.base_lm.blocks(), *self.residual_lm.blocks()]
        rows = [(layer.attention.config.num_kv_heads, layer.attention.config.head_dim) for layer in layers]
        return [CacheSpec({"k": row, "v": row}) for row in rows]

    def embed_encoder_tokens(self, tokens: Tensor, normed: Tensor | None = None, lora: Lora | None = None) -> Tensor:
        """LocEnc's tokens of patches [n, 1 + P, h] -> [n, H]. normed: as in LocalEncoder."""
        return self._project("enc_to_lm_proj", self.feat_encoder(tokens, normed), lora)

    def _project(self, name: str, x: Tensor, lora: Lora | None) -> Tensor:
        y = project(getattr(self, name), x)
        return y if lora is None else lora.project(name, y, x)

    def rotary(self, positions: Tensor) -> Rotary:
        """positions int64 [n] -> the TSLM's cosines and sines there."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)

    def audio_backbone(
        self, embeds: Tensor, rotary: Rotary, batch: PagedBatch, lora: Lora | None = None
    ) -> tuple[Tensor, Tensor]:
        """Patches alone, embedded [n, H] -> TSLM after FSQ and RALM, each [n, H]."""
        lm = self.fsq_layer(self.semantic(embeds, rotary, batch, lora))
        return lm, self.residual(self.fuse(lm, embeds, lora), batch, lora)

    def prompt_backbone(
        self,
        token_ids: Tensor,
        patch_index: Tensor,
        patches: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        lora: Lora | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rows of text, and of patches: patch_index int64 [n] is a row's in `patches` [a, P, D], -1 at text. FSQ and
        the RALM's second input are for patches alone. -> like audio_backbone.

        lora: of the rows. Without patches, which the kernels need not support, their work is left out.
        """
        tokens = self.embed_tokens(token_ids)
        if patches.shape[0] == 0:
            lm = self.semantic(tokens, self.rotary(positions), batch, lora)
            return lm, self.residual(self.fuse(lm, torch.zeros_like(lm), lora), batch, lora)
        is_patch = (patch_index >= 0)[:, None]
        at = patch_index.clamp(min=0)
        encoded = self.feat_encoder(self.feat_encoder.tokens(patches))
        embeds = project(self.enc_to_lm_proj, encoded).index_select(0, at)
        if lora is not None:
            lora.project("enc_to_lm_proj", embeds, encoded.index_select(0, at))
        hidden = self.semantic(torch.where(is_patch, embeds, tokens), self.rotary(positions), batch, lora)
        lm = torch.where(is_patch, self.fsq_layer(hidden), hidden)
        return lm, self.residual(self.fuse(lm, torch.where(is_patch, embeds, 0.0), lora), batch, lora)

    def semantic(self, embeds: Tensor, rotary: Rotary, batch: PagedBatch, lora: Lora | None = None) -> Tensor:
        """TSLM: [n, H] -> [n, H]."""

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            return cached_attention(q, k, v, layer, batch, rotary)

        return self.base_lm(embeds, attend, lora=None if lora is None else lora.stack("base_lm"))

    def fuse(self, lm: Tensor, embeds: Tensor, lora: Lora | None = None) -> Tensor:
        """TSLM output and patch embeddings (0 at text), [n, H] each -> the RALM's input [n, H]."""
        return self._project("fusion_concat_proj", torch.cat((lm, embeds), dim=-1), lora)

    def residual(self, embeds: Tensor, batch: PagedBatch, lora: Lora | None = None) -> Tensor:
        """RALM, which has no rotation: [n, H] -> [n, H]."""
        first = len(self.base_lm.layers)

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            return cached_attention(q, k, v, first + layer, batch)

        return self.residual_lm(embeds, attend, lora=None if lora is None else lora.stack("residual_lm"))

    def condition(self, lm: Tensor, residual: Tensor, lora: Lora | None = None) -> tuple[Tensor, Tensor]:
        """Hidden vectors [rows, H] each -> mu_lm and mu_res [rows, h]."""
        return self._project("lm_to_dit_proj", lm, lora), self._project("res_to_dit_proj", residual, lora)

    def stop_logits(self, lm: Tensor) -> Tensor:
        """[rows, H] -> [rows, 2]; the second says stop."""
        return self.stop_head(F.silu(project(self.stop_proj, lm)))


def network_rules(config: VoxCPM2Config) -> list[Rule]:
    """Published tensor names -> parameters of VoxCPM2Network."""
    language, encoder, dit = language_block(config.lm), local_block(config.encoder, config.lm), config.dit
    stacks = (
        (language, "base_lm.", "base_lm."),
        (language, "residual_lm.", "residual_lm."),
        (encoder, "feat_encoder.encoder.", "feat_encoder.encoder.stack."),
        (local_block(dit, config.lm), "feat_decoder.estimator.decoder.", "feat_decoder.decoder.stack."),
    )
    rules = [Rule("base_lm.embed_tokens.weight", "embed_tokens.weight")]
    for block, published, ours in stacks:
        rules += block_rules(block, f"{published}layers.{{i}}.", f"{ours}layers.{{i}}.")
        rules.append(Rule(f"{published}norm.weight", f"{ours}norm.weight"))
    same = (
        "feat_encoder.in_proj fsq_layer.in_proj fsq_layer.out_proj enc_to_lm_proj lm_to_dit_proj res_to_dit_proj "
        "fusion_concat_proj stop_proj stop_head"
    )
    rules += [Rule(f"{name}.{{rest}}", f"{name}.{{rest}}") for name in same.split()]
    rules.append(Rule("feat_encoder.special_token", "feat_encoder.special_token"))
    for name in ("in_proj", "cond_proj", "out_proj", "time_mlp", "delta_time_mlp"):
        rules.append(Rule(f"feat_decoder.estimator.{name}.{{rest}}", f"feat_decoder.{name}.{{rest}}"))
    return rules
