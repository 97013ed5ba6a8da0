"""What a job's story says happened, in the reader's language. The record keeps one English word for each thing; here is what people read."""

from __future__ import annotations

from collections.abc import Mapping

from intertie.text import Lang, known, say

HAPPENED: Mapping[str, str] = {
    "submitted": "已提交",
    "placed": "已派往站点",
    "replaced": "改在别处重跑",
    "adopted": "已接管",
    "taken in while islanded": "站点自治运行期间接收",
    "claimed": "站点已接收",
    "declined by the owner": "所有者谢绝",
    "refused by the site": "站点拒绝",
    "given up before it started": "启动前放弃",
    "staging": "准备工作目录",
    "in the site's own queue": "进入站点排队",
    "the site's scheduler says": "站点调度系统报告",
    "started": "开始运行",
    "results stored": "结果已收妥",
    "no results": "没有结果",
    "cancel requested": "请求取消",
    "cancelled": "已取消",
    "offer withdrawn": "撤回派发",
    "withdrawal seen by the site": "站点已得知撤回",
    "stop reached the site": "停止指令已到站点",
    "preemption asked for": "请求抢占",
    "site silent": "站点失联",
    "site heard again": "站点恢复联系",
    "held in a new journal": "在新日志中找到",
    "devices let go": "释放设备",
    "lost": "失联结案(结果不明)",
    "gone": "站点已无此运行(结果不明)",
    "refined: it never started": "更正:从未启动",
}
ENDS: Mapping[str, str] = {"ended": "结束", "refined": "更正"}
"""Of these an outcome follows: `ended: succeeded`."""


def happened(what: str, lang: Lang) -> str:
    """`what` of a line, for people; a word that is newer than this table stays as it is."""
    if lang == "en":
        return what
    begins, _, outcome = what.partition(": ")
    if what not in HAPPENED and begins in ENDS:
        key = f"state.{outcome}"
        return f"{ENDS[begins]}:{say(key, lang) if known(key) else outcome}"
    return HAPPENED.get(what, what)
