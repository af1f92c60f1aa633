"""Getting a legal plan: the policy is asked, its plan is checked, and a fallback stands in for a turn."""

import logging

from loongserve.policies.base import ClusterView, Plan, Policy
from loongserve.runtime.invariants import check_plan
from loongserve.runtime.journal import Journal

logger = logging.getLogger(__name__)


class Planner:
    """Asks ``policy``; where it raises, breaks an invariant or would stall the cluster, asks ``fallback`` instead.

    Every fault is counted in the journal; each kind is logged once.
    """

    def __init__(self, policy: Policy, fallback: Policy, journal: Journal) -> None:
        self._policies = (policy, fallback)
        self._journal = journal
        self._known_faults: set[tuple[str, str]] = set()

    def plan(self, view: ClusterView) -> Plan | None:
        """Make a plan that keeps all invariants.

        Args:
            view: The cluster now, with at least one live request.

        Returns:
            The plan, or None when neither policy has a legal one that lets anything run.
        """
        running = any(instance.running is not None for instance in view.instances)
        for number, policy in enumerate(self._policies):
            if number > 0:
                self._journal.count("fallback_plans")
            plan = self._ask(policy, view)
            if plan is not None and (plan.launches or running):
                return plan
            if plan is not None:
                self._fault(policy, view, "stall", "stall: it launches nothing although nothing runs and work waits")
        return None

    def _ask(self, policy: Policy, view: ClusterView) -> Plan | None:
        try:
            plan = policy.plan(view)
            violation = check_plan(view, plan)
        except Exception as error:
            # A policy is a plug-in: whatever it raises is logged with its traceback and must not stop the cluster.
            self._fault(policy, view, f"exception {type(error).__name__}", f"raised {error!r}", raised=True)
            return None
        if violation is None:
            return plan
        self._journal.count("plan_violations")
        self._fault(policy, view, violation.invariant, str(violation))
        return None

    def _fault(self, policy: Policy, view: ClusterView, name: str, text: str, raised: bool = False) -> None:
        if (policy.name, name) in self._known_faults:
            return
        self._known_faults.add((policy.name, name))
        logger.warning("policy %s: %s; it is passed over for this turn", policy.name, text, exc_info=raised)
        self._journal.note(view.now_s, "violation", f"{policy.name}: {text}")
