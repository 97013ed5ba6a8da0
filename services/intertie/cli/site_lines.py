"""A site and its pools as a person reads them, in both languages. What a site's own scheduler does beside us is said in numbers, with its age."""

from __future__ import annotations

from collections import Counter

from intertie.cli.out import ago, local
from intertie.cli.pools import decided_lines, mode_word, phase_word
from intertie.contracts.site import RIGHT, Freshness, PoolInventory, PoolRecord, SiteKind, SiteRecord
from intertie.text import known, language, say


def kind_text(kind: SiteKind) -> str:
    return say(f"site.kind_{kind}", language())


def what_text(pool: PoolRecord) -> str:
    """The thing that is lent: a card by its model, or CPU slots."""
    return say("site.slots", language()) if pool.profile.accelerator == "none" else pool.profile.accelerator


def head_lines(site: SiteRecord) -> list[str]:
    """Who it is, how fresh the view of it is, and what its owner says about taking work."""
    lang = language()
    first = [site.site, site.title, kind_text(site.kind), site.owner]
    hears = say("site.hears_us" if site.hears_us else "site.hears_us_not", lang)
    lines = [
        "  ".join(word for word in first if word),
        f"{say(f'freshness.{site.freshness}', lang)}  {ago(site.last_heard)}  {hears}  {say('site.agent', lang, version=site.agent_version)}",
    ]
    if site.single_user:
        lines.append(say("site.single_user", lang, tenant=site.owner_tenant))
    lines += own_words(site)
    if site.clock_offset_s is not None:
        lines.append(say("site.clock_offset", lang, offset=f"{site.clock_offset_s:+.3f}"))
    return lines


def own_words(record: SiteRecord) -> list[str]:
    """What the site's owner and the site itself say about taking work, and what stands still."""
    lang, said = language(), []
    if record.left_at is not None:
        said.append(say("site.left", lang, at=local(record.left_at)))
    if record.paused and record.paused_until is not None:
        said.append(say("site.paused_until", lang, until=local(record.paused_until), reason=record.paused_reason or "-"))
    elif record.paused:
        said.append(say("site.paused", lang, reason=record.paused_reason or "-"))
    if not record.accepting:
        said.append(say("site.not_accepting", lang, why=record.condition or "?"))
    if not record.self_stop:
        said.append(say("site.no_self_stop", lang))
    said += [say("site.lane_stands", lang, lane=lane, state=state) for lane, state in sorted(record.lanes.items())]
    return said


def pool_lines(pool: PoolRecord) -> list[str]:
    """What it is, what was decided about it, what it holds and how old that is."""
    lang, profile = language(), pool.profile
    size = f"×{profile.count}"
    if profile.accelerator == "none":
        what = [what_text(pool), size, say("site.node_memory", lang, mib=profile.memory_mib)]
    else:
        what = [what_text(pool), size, say("site.card_memory", lang, mib=profile.memory_mib), profile.interconnect]
    what.append(say("site.lends", lang, count=profile.lendable.devices))
    lines = [
        "  ".join(
            [f"{pool.site}/{pool.pool}", mode_word(profile.mode), phase_word(pool.phase), say("site.revision", lang, n=profile.revision)]
        ),
        "  " + "  ".join(what),
        *[f"  {words}" for words in decided_lines(pool)],
    ]
    if pool.cordoned:
        lines.append("  " + say("site.cordoned", lang, reason=pool.cordon_reason or "-"))
    images = pool.inventory.images if pool.inventory is not None else None
    if images is not None and images.runtime:
        lines.append("  " + say("site.images", lang, told=images.told))
    if pool.inventory is not None:
        lines += [f"  {words}" for words in held_lines(pool, pool.inventory)]
    return lines


def held_lines(pool: PoolRecord, inventory: PoolInventory) -> list[str]:
    """Its devices by state, or its rights to queue; and beside a queue of the site's own, what that does for others."""
    lang = language()
    counts = Counter(seen.state.value for seen in inventory.devices)
    rights = any(seen.device.id.startswith(RIGHT) for seen in inventory.devices)
    told = say("site.comma", lang).join(f"{n} {device_text(state, rights=rights)}" for state, n in sorted(counts.items()))
    # A site says what it holds when that changes: as long as it is heard, what it said last is so.
    age = say("site.unchanged" if pool.freshness is Freshness.FRESH else "site.last_known", lang, age=ago(pool.inventory_at))
    lines = [f"{say('site.rights', lang, told=told) if rights else told}  ({age})"] if told else []
    if (load := inventory.native) is not None:
        beside = say("site.native", lang, running=load.running, waiting=load.waiting, busy=load.devices_busy)
        if load.every_s:
            beside += say("site.looks", lang, every=f"{load.every_s:.1f}".removesuffix(".0"), rpc=f"{load.rpc_per_minute:.1f}")
        lines.append(beside)
    return lines


def device_text(state: str, *, rights: bool) -> str:
    """`foreign` is a process that is not ours on a card, and an own user's job where the site has a queue."""
    key = "device.own_users" if rights and state == "foreign" else f"device.{state}"
    return say(key, language()) if known(key) else state
