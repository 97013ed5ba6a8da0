"""What the commands about call offerings say, in English and Chinese: key → (English, Chinese), terms as in the catalogue."""

from __future__ import annotations

from collections.abc import Mapping

from intertie.text import language

TEXTS: Mapping[str, tuple[str, str]] = {
    "offering_columns": ("OFFERING,PROTOCOL,MODELS,STATE,ASKED,PROMISED", "调用服务,协议,模型,状态,站点报价,承诺"),
    "no_offerings": (
        "no call offering is for you: a site's owner declares them in site.toml",
        "没有可用的调用服务:由站点所有者在 site.toml 中声明",
    ),
    "no_such_offering": ("there is no offering {id} for you", "没有可供调用的服务 {id}"),
    "available": ("available", "可用"),
    "paused": ("paused by its owner", "所有者已暂停"),
    "unavailable": ("not available: {reason}", "不可用:{reason}"),
    "withdrawn": ("offered no more", "已撤下"),
    "nothing_promised": ("nothing", "无"),
    "promise_response": ("95 % within {ms} ms", "95% 在 {ms} 毫秒内"),
    "promise_first": ("first byte: 95 % within {ms} ms", "首字节:95% 在 {ms} 毫秒内"),
    "promise_availability": ("{percent} % answered", "可用率 {percent}%"),
    "base_url": ("base URL of an OpenAI client:  {url}", "OpenAI 客户端的 base URL:  {url}"),
    "post_url": ("POST JSON to:  {url}", "将 JSON POST 到:  {url}"),
    "limits": (
        "limits:  body {body} KiB · {duration} s · stalls at {stall} s · {concurrency} at once · {minute} a minute and tenant",
        "限制:  请求体 {body} KiB · {duration} 秒 · 停顿 {stall} 秒 · 同时 {concurrency} 个 · 每租户每分钟 {minute} 次",
    ),
    "month": (
        "{month}:  {calls} calls · {answered} answered · {failed} failed · availability {availability} %",
        "{month}:  {calls} 次调用 · 已应答 {answered} · 失败 {failed} · 可用率 {availability}%",
    ),
    "measured": (
        "measured:  p95 {response} ms · first byte p95 {first} ms · promise kept {kept}, missed {missed}",
        "实测:  p95 {response} 毫秒 · 首字节 p95 {first} 毫秒 · 达成 {kept},未达成 {missed}",
    ),
    "missing_records": (
        "{count} calls of which the site's record has not come",
        "{count} 次调用尚缺站点记录",
    ),
    "no_calls": ("no call fits", "没有符合条件的调用"),
    "call_columns": ("CALL,WHEN,OFFERING,END,MS,TOKENS,STATE,AMOUNT", "调用,时间,服务,结果,毫秒,令牌,状态,金额"),
    "more": ("more: --after {after}", "更多:--after {after}"),
    "tokens_unknown": ("unknown", "未知"),
    "waits": ("waits: {reason}", "待定:{reason}"),
    "state.settled": ("settled", "已入账"),
    "state.waiting": ("waiting", "等待中"),
    "state.suspense": ("in suspense", "挂起"),
    "outcome.completed": ("completed", "完成"),
    "outcome.incomplete": ("incomplete", "未完整"),
    "outcome.client_gone": ("the caller hung up", "调用方挂断"),
    "outcome.rejected": ("refused by the server", "被上游拒绝"),
    "outcome.upstream_failed": ("the server failed", "上游失败"),
    "outcome.upstream_stalled": ("the server stalled", "上游停顿"),
    "outcome.timed_out": ("timed out", "超时"),
    "outcome.interrupted": ("interrupted", "链路中断"),
    "outcome.refused": ("refused", "被拒绝"),
    "reason.site_word": ("the site's record has not come", "尚未收到站点记录"),
    "reason.gateway_word": ("the gateway's record has not come", "尚未收到网关记录"),
    "reason.no_spec": ("no meter spec is agreed", "尚无计量口径"),
    "reason.no_price": ("the meter spec has no price for this offering", "计量口径没有该服务的价格"),
    "reason.tokens_unknown": ("nobody counted its tokens", "令牌数未知"),
    "reason.unproven": ("the site's seal does not hold", "站点签名无效"),
    "reason.no_grant": ("the gateway did not grant it", "没有网关的授权"),
    "promise_missed": ("missed: {what}", "未达成:{what}"),
    "differs": ("the two records differ: {what}", "两方记录不一致:{what}"),
    "statement_title": ("Calls of offerings", "服务调用"),
    "statement_line": (
        "{day}  {site}/{offering}  {calls} calls  {given} tokens in, {made} out  {amount}",
        "{day}  {site}/{offering}  {calls} 次  输入 {given} 令牌,输出 {made}  {amount}",
    ),
    "statement_waiting": (
        "  {count} wait: intertie calls --offering {site}/{offering} --day {day}",
        "  {count} 次待定:intertie calls --offering {site}/{offering} --day {day}",
    ),
    "endpoint_columns": ("ENDPOINT,UPSTREAM,STATE,NOW,CALLS,REFUSED", "服务,上游,状态,进行中,调用,拒绝"),
    "no_endpoints": (
        "nothing is offered here: write [[endpoint]] into site.toml (ops/docs/endpoint.md)",
        "本站未提供调用服务:在 site.toml 中写 [[endpoint]](见 ops/docs/endpoint.zh.md)",
    ),
    "endpoint_problem": ("nothing is offered: {problem}", "未提供任何服务:{problem}"),
}


def say_calls(key: str, **values: object) -> str:
    """The text in the reader's language, filled."""
    english, chinese = TEXTS[key]
    return (chinese if language() == "zh" else english).format(**values)


def word(family: str, name: str) -> str:
    """A word of a closed set, which may be newer than this catalogue."""
    return say_calls(f"{family}.{name}") if f"{family}.{name}" in TEXTS else name
