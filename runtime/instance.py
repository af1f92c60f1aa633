"""One elastic instance: a replica of the model, a KV pool, and the iterations that the manager commands."""

import torch

from loongserve.comm.transport import Transport
from loongserve.kernels.native_build import load_native
from loongserve.kvpool.slots import SlotAllocator
from loongserve.kvpool.storage import KVStorage
from loongserve.kvpool.table import SlotTable
from loongserve.runtime.batch import MemberBatch, at_step, plan_member, saved_here
from loongserve.runtime.esp_attention import EspAttention
from loongserve.runtime.executor import Emit
from loongserve.runtime.model.llama import LlamaModel
from loongserve.runtime.protocol import Iteration, SampledToken
from loongserve.runtime.sampler import sample


class Instance:
    """Runs iterations on one replica; stateless but for the KV pool. Not thread-safe: one thread calls it.

    Args:
        instance: its number, which is its rank in ``transport``.
        model: the replica.
        transport: to its peers.
        num_slots: KV tokens that its pool holds.
    """

    def __init__(self, instance: int, model: LlamaModel, transport: Transport, num_slots: int) -> None:
        self.instance = instance
        self.num_slots = num_slots
        self._model = model
        self._transport = transport
        config = model.config
        if model.device.type == "cpu":
            # Compiled on a machine's first start, before the instance says that it is ready, not in a request.
            load_native()
        self._storage = KVStorage(
            config.num_layers, num_slots, config.num_kv_heads, config.head_dim, model.dtype, model.device
        )
        self._table = SlotTable(SlotAllocator(num_slots))

    def execute(self, iteration: Iteration, emit: Emit) -> None:
        """Run one iteration as a member of its group.

        Args:
            iteration: this instance is in its group.
            emit: called after each step in which this member sampled, with the step's number and its tokens.

        Raises:
            OutOfSlots: the manager promised slots that are not free.
            PeerLost: a member of the group is gone.
        """
        member = iteration.group.index(self.instance)
        for segment in iteration.segments:
            for begin, end in saved_here(segment.save, self.instance):
                self._table.reserve(segment.request, begin, end)
        sampled: dict[int, int] = {}
        with torch.inference_mode():
            for step in range(iteration.steps):
                segments = [at_step(s, step, sampled.get(s.request)) for s in iteration.segments]
                batch = plan_member(iteration, segments, member, self._table)
                tokens = self._run(batch)
                sampled = {token.request: token.token for token in tokens}
                if tokens:
                    emit(step, tokens)

    def free(self, request: int) -> None:
        """Give back all slots of a request; one that has none here is ignored."""
        self._table.free(request)

    def close(self) -> None:
        """Leave the world; nothing can be executed after."""
        self._transport.close()

    def _run(self, batch: MemberBatch) -> tuple[SampledToken, ...]:
        model = self._model
        attention = EspAttention(batch, model.config, self._storage, self._transport, model.dtype, model.device)
        hidden = model.forward(batch.tokens.to(model.device), batch.positions.to(model.device), attention)
        if not batch.samples:
            return ()
        rows = torch.tensor([s.row for s in batch.samples], device=model.device)
        logits = model.logits(hidden[rows])
        # Narrowed: a sample is made only of segments that have sampling parameters.
        params = [s.segment.sampling for s in batch.samples if s.segment.sampling is not None]
        positions = [s.segment.begin + s.segment.count for s in batch.samples]
        tokens = sample(logits, params, positions)
        return tuple(
            SampledToken(
                request=s.segment.request,
                position=position,
                token=token,
                logits=logits[i].cpu().numpy().tobytes() if s.segment.return_logits else b"",
            )
            for i, (s, position, token) in enumerate(zip(batch.samples, positions, tokens, strict=True))
        )
