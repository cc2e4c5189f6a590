"""What the nodes of one model have in common, built once: step lengths, frames, masks, rotary rows."""

import openvino.opset13 as ops
from openvino import Output

from transforms.frames import Frame, Step, past_keys, right_aligned_frame, split_frame
from transforms.gqa_site import Site
from transforms.key_layout import Branch, KeyLayout
from transforms.masks import additive_mask, bias_by_slot, visible
from transforms.opset import OutputKey, i32, key_of, scalar_i32
from transforms.rotary import gather_table, rotary_positions, rotate

_WINDOW_DEPENDENT = (KeyLayout.ROLLING, KeyLayout.GATHERED)


class SharedParts:
    """Builds a part when a node first asks for it; the same output for every node that may share it."""

    def __init__(self, branch: Branch, num_tokens: Output | None) -> None:
        self._branch = branch
        self._num_tokens = num_tokens
        self._steps: dict[tuple[OutputKey, int], Step] = {}
        self._frames: dict[tuple[object, ...], Frame] = {}
        self._masks: dict[tuple[object, ...], Output] = {}
        self._positions: dict[tuple[object, ...], Output] = {}
        self._tables: dict[tuple[OutputKey, OutputKey], Output] = {}

    def step(self, site: Site) -> Step:
        """The step's lengths, one per seqlens_k and block size."""
        seqlens_k = site.gqa.seqlens_k
        key = (key_of(seqlens_k), site.sequence_length)
        if key not in self._steps:
            total = ops.add(scalar_i32(seqlens_k), i32([1])).output(0)
            rows = site.sequence_length
            num_tokens = self._num_tokens if rows > 1 else None  # one row is always real
            self._steps[key] = Step(total=total, num_tokens=num_tokens, sequence_length=rows)
        return self._steps[key]

    def frame(self, site: Site) -> Frame:
        """Positions of the node's slots, shared by the nodes whose slots lie alike."""
        window = site.gqa.local_window_size if site.layout in _WINDOW_DEPENDENT else None
        key = (key_of(site.gqa.seqlens_k), site.sequence_length, site.layout, site.capacity, window)
        if key not in self._frames:
            self._frames[key] = self._build_frame(site)
        return self._frames[key]

    def _build_frame(self, site: Site) -> Frame:
        step = self.step(site)
        match self._branch:
            case Branch.PREFILL:
                return right_aligned_frame(step, site.capacity + site.sequence_length)
            case Branch.GENERATE:
                window = site.gqa.local_window_size
                return split_frame(step, past_keys(site.layout, step, site.capacity, window))

    def mask(self, site: Site) -> Output:
        """The additive mask: one per distinct frame, window and bias."""
        gqa, frame = site.gqa, self.frame(site)
        bias_key = None if gqa.attention_bias is None else key_of(gqa.attention_bias)
        key = (
            key_of(frame.key_position),
            gqa.local_window_size,
            gqa.causal,
            str(gqa.element_type),
            bias_key,
        )
        if key not in self._masks:
            bias = None if gqa.attention_bias is None else bias_by_slot(gqa.attention_bias, frame)
            keys = visible(frame, local_window_size=gqa.local_window_size, causal=gqa.causal)
            self._masks[key] = additive_mask(keys, gqa.element_type, bias)
        return self._masks[key]

    def rotated(self, site: Site, source: Output) -> Output:
        """The rows with the node's rotary embedding, unchanged where it has none."""
        rotary = site.gqa.rotary
        if rotary is None:
            return source
        block = self.frame(site).query_position
        origin = key_of(block if rotary.position_ids is None else rotary.position_ids)
        if origin not in self._positions:
            self._positions[origin] = rotary_positions(rotary, block, site.sequence_length)
        positions = self._positions[origin]
        cos, sin = (self._table(table, positions) for table in (rotary.cos_cache, rotary.sin_cache))
        return rotate(source, cos, sin, interleaved=rotary.interleaved)

    def _table(self, table: Output, positions: Output) -> Output:
        key = (key_of(table), key_of(positions))
        if key not in self._tables:
            self._tables[key] = gather_table(table, positions)
        return self._tables[key]
