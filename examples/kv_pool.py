"""KV memory by the token: slots are taken for positions, written, read back, and given back. No pages, no padding."""

import torch

from loongserve.kernels.kv import gather_kv, save_kv
from loongserve.kvpool.ledger import PlacementLedger
from loongserve.kvpool.slots import OutOfSlots, SlotAllocator
from loongserve.kvpool.storage import KVStorage
from loongserve.kvpool.table import SlotTable

storage = KVStorage(num_layers=1, num_slots=10, num_kv_heads=2, head_dim=64, dtype=torch.float32)
table = SlotTable(SlotAllocator(10))
k, v = torch.randn(2, 6, 2, 64)

# Request 1 keeps positions 0..3 here; 4 and 5 go to another instance, and so have slot -1.
slots = torch.cat((table.reserve(request=1, begin=0, end=4), torch.tensor([-1, -1])))
save_kv(k, v, slots, storage.k[0], storage.v[0])
read_k, _ = gather_kv(storage.k[0], storage.v[0], table.slots(1, 1, 3))
assert torch.equal(read_k, k[1:3])
try:
    table.reserve(request=2, begin=0, end=7)
except OutOfSlots as error:
    print("all or nothing:", error)
print("request 1 gave back", table.free(1), "slots; request 2 now gets", table.reserve(2, 0, 7).tolist())

# The manager keeps the same books for all instances, without tensors.
ledger = PlacementLedger({0: 10, 1: 10})
ledger.place(1, [(0, 0, 4), (1, 4, 6)])
print("request 1 lies at", ledger.placement(1), "and instance 0 has", ledger.free_slots(0), "free slots")
