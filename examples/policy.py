"""Ask the policy what to run: a long prompt waits, another request decodes, and all three instances are idle."""

from loongserve.policies.base import ClusterView, InstanceView, RequestView
from loongserve.policies.registry import make_policy

view = ClusterView(
    now_s=10.0,
    instances=(
        InstanceView(0, num_slots=1000, free_slots=700),
        InstanceView(1, num_slots=1000, free_slots=1000),
        InstanceView(2, num_slots=1000, free_slots=1000),
    ),
    prefills=(RequestView(2, 9.5, prompt_tokens=1500, computed_tokens=0, known_tokens=1500, max_kv_tokens=1600),),
    decodes=(RequestView(1, 5.0, 299, 300, 301, 400, placement=((0, 0, 300),), master=0),),
)
for name in ("elastic", "static"):
    plan = make_policy(name).plan(view)
    print(f"{name}: {len(plan.launches)} launch, drains {dict(plan.drains)}, reasons {plan.reasons}")
    for launch in plan.launches:
        for segment in launch.segments:
            print(f"  group {launch.group} computes {segment.count} tokens of request {segment.request},")
            print(f"  and their KV goes to {segment.save} as (instance, begin, end)")
