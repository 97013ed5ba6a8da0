"""What `intertie local` and `intertie site leave` say, in English and Chinese: key → (English, Chinese), terms as in the catalogue."""

from __future__ import annotations

from collections.abc import Mapping

from intertie.text import language

TEXTS: Mapping[str, tuple[str, str]] = {
    "submitted": ("{job} is {word}.  intertie local logs -f {job}", "{job} {word}。  intertie local logs -f {job}"),
    "no_jobs": ("No local jobs yet: intertie local submit -- COMMAND", "还没有本地任务:intertie local submit -- 命令"),
    "cancelled": ("{job}: {word}", "{job}:{word}"),
    "columns": ("JOB,NAME,USER,STATE,WHERE,SUBMITTED,RAN,END", "任务,名称,用户,状态,位置,提交,运行,结果"),
    "hub_heard": ("the hub is heard", "平台连接正常"),
    "single_user": (
        "single-user: the agent is not root; only the owner's tenant is taken",
        "单用户模式:接入端非 root 运行,只接受所有者自己的租户",
    ),
    # A device, as its owner sees it.
    "device.free": ("free", "空闲"),
    "device.ours": ("lent", "已让出"),
    "device.local": ("own", "自用"),
    "device.foreign": ("busy with other work", "被其他进程占用"),
    "device.lost": ("lost", "掉卡"),
    "device.unknown": ("unknown", "状态不明"),
    "device.until": (" until {at}", ",截至 {at}"),
    "no_gpu": ("no GPU: {why}", "没有 GPU:{why}"),
    "word.waiting": ("waiting", "等待中"),
    "word.preparing": ("preparing", "准备中"),
    "word.running": ("running", "运行中"),
    "word.ended": ("ended", "已结束"),
    "outcome.succeeded": ("succeeded", "成功"),
    "outcome.failed": ("failed", "失败"),
    "outcome.cancelled": ("cancelled", "已取消"),
    "outcome.unknown": ("unknown", "结果不明"),
    # Whether the hub is heard.
    "why.start": ("it has not been heard since the agent's start", "接入端启动以来尚未收到平台应答"),
    "why.bus": ("the bus cannot be reached", "无法连接消息总线"),
    "why.silent": ("the bus is there, the hub does not answer", "总线可达,平台无应答"),
    "alone": (
        "works alone since {since} ({ago}): {why}; nothing is wrong with this site",
        "自 {since} 起自治运行({ago}):{why};本站点工作正常",
    ),
    "alone_means": (
        "what runs goes on, your own people submit as always: intertie local submit",
        "运行中的任务继续运行,本站点用户照常提交:intertie local submit",
    ),
    "requests": (
        "{count} job requests wait for your answer: intertie local requests list",
        "{count} 个作业请求待答复:intertie local requests list",
    ),
    "lent": ("lent: {count}", "已让出:{count}"),
    "lent_row": ("  {attempt}  {where}  {word}{since}{by}", "  {attempt}  {where}  {word}{since}{by}"),
    "since": (" since {at}", ",自 {at}"),
    "by_allowance": (" · by a tenant's islanded allowance", " · 按租户自治额度接收"),
    "own": ("own: {running} running, {waiting} waiting", "本站点自用:{running} 运行 {waiting} 等待"),
    "own_row": ("  {job}  {name}  {user}  {where}  {word}", "  {job}  {name}  {user}  {where}  {word}"),
    "word.ending": ("ending", "正在结束"),
    "told_all": ("the hub holds all that this site has to tell", "应上报的记录平台均已收妥"),
    "to_tell": ("will be told when the hub is heard:", "恢复连接后将上报:"),
    "to_tell_row": (
        "  {lane}: {entries} entries, {size}, the oldest of {oldest}",
        "  {lane}:{entries} 条,{size},最早一条 {oldest}",
    ),
    "lane.registry": ("to the registry", "上报登记"),
    "lane.scheduler": ("to the scheduler", "上报调度"),
    "lane.metering": ("to metering", "上报计量"),
    # Lanes that stand still: in words, and what to do.
    "trouble.forked": (
        "{lane}: stands still, this journal and the hub's copy differ at the same number → restart the agent: it opens a new journal and tells all again",
        "{lane}:停滞,本地日志与平台副本在同一编号处不一致 → 重启接入端,将新开日志并重新上报",
    ),
    "trouble.agent_restored": (
        "{lane}: stands still, this journal is older than what the hub holds (restored from a copy?) → the agent opens a new one by itself, or when restarted",
        "{lane}:停滞,本地日志早于平台已有记录(可能由备份恢复)→ 接入端会自行新开日志;如未恢复请重启接入端",
    ),
    "trouble.hub_restored": (
        "{lane}: stands still, the hub lacks what it once held (restored from a backup) → the agent says what is lost and goes on; tell the hub's operator",
        "{lane}:停滞,平台缺少曾确认的记录(可能由备份恢复)→ 接入端会声明缺失范围后继续;请通知平台运营方",
    ),
    "trouble.superseded": (
        "{lane}: another agent of this site took over; what runs here goes on → restart this agent if it is the right one, else stop it",
        "{lane}:本站点的另一个接入端已接管;此处运行中的任务继续 → 若应由本接入端负责请重启它,否则停止它",
    ),
    "trouble.contested": (
        "{lane}: two agents of this site take over from each other → stop one of the two; ten minutes later the hub trusts the other again",
        "{lane}:本站点两个接入端互相接管 → 停止其中一个,十分钟后平台恢复信任另一个",
    ),
    "trouble.version": (
        "{lane}: the hub is older than this agent → its operator upgrades the hub; until then nothing new comes, what runs goes on",
        "{lane}:平台版本早于本接入端 → 请平台运营方升级;在此之前不派新任务,运行中的任务继续",
    ),
    "trouble.epoch_lower": (
        "{lane}: the hub came back from a backup and was not told so → its operator runs: intertie hub restored",
        "{lane}:平台由备份恢复但未声明 → 请平台运营方执行:intertie hub restored",
    ),
    "trouble.answer": (
        "{lane}: the hub acknowledges what was not sent → a fault of the hub's: tell its operator, nothing is lost here",
        "{lane}:平台确认了未发送的内容 → 平台故障,请通知运营方;本地记录无损",
    ),
    "trouble.journal": (
        "{lane}: the journal on this machine could not be read or written → free space or repair the disk, then restart the agent",
        "{lane}:本机日志无法读写 → 请清理空间或修复磁盘,然后重启接入端",
    ),
    "trouble.other": (
        "{lane}: stands still ({state}) → restart the agent; if it stays, tell the hub's operator",
        "{lane}:停滞({state})→ 请重启接入端;若仍如此请通知平台运营方",
    ),
    # What it works by.
    "known": ("works by (last told by the hub):", "依据(平台最近一次下发):"),
    "known.settings": ("settings {name}, of {as_of} ({ago})", "设置{name},{as_of}({ago})"),
    "known.revision": ("revision {number}", "第 {number} 版"),
    "known.no_settings": (
        "no settings yet: nothing of the federation's can run here before the hub was heard once",
        "尚无设置:首次收到平台应答前不会运行平台任务",
    ),
    "known.mapping": (
        "tenant {name} is {value} here; it holds until the hub says otherwise",
        "租户 {name} 在本站点为 {value};在平台另行通知前有效",
    ),
    "known.allowance": (
        "tenant {name} may use {value} at once while islanded, until {valid_until}; then its new work is refused, what runs goes on",
        "租户 {name} 自治期间最多同时使用 {value},至 {valid_until};到期后拒绝其新任务,运行中的继续",
    ),
    "known.allowance_lapsed": (
        "tenant {name}'s islanded allowance of {value} ended {valid_until}: its new work is refused, what runs goes on",
        "租户 {name} 的自治额度 {value} 已于 {valid_until} 到期:拒绝其新任务,运行中的继续",
    ),
    "known.agreement": (
        "prices: {name}, of {as_of}: {value}; usage is priced by the agreement of its day, whenever it is told",
        "价格:{name},{as_of} 起:{value};用量按发生日的口径计价,与上报时间无关",
    ),
    "known.own_user": ("the agent's own user", "接入端自身用户"),
    # The owner's button.
    "paused": (
        "lending is PAUSED by {by}{until}{reason}: nothing new is taken, {lent} lent go on",
        "{by} 已暂停让出{until}{reason}:不接新任务,已让出的 {lent} 个继续运行",
    ),
    "until": (" until {at}", ",至 {at}"),
    "pause_how": (
        "end lent work: intertie local reclaim ATTEMPT --reason …   lend again: intertie local resume",
        "结束已让出的任务:intertie local reclaim 运行号 --reason …   恢复让出:intertie local resume",
    ),
    "resumed": ("lending goes on", "已恢复让出"),
    "reclaimed": (
        "{attempt} is being stopped and ends as preempted: its tenant does not pay for the owner's wish",
        "正在停止 {attempt},按被抢占结束:租户不为此付费",
    ),
    # Disk.
    "disk": ("disk: {free} free, the journal takes {journal}", "磁盘:剩余 {free},日志占用 {journal}"),
    "disk_closed": (
        "no new work is taken: {text} [{code}] → free space; what runs goes on and all is recorded",
        "暂不接收新任务:{text} [{code}] → 请清理空间;运行中的继续,记录不丢",
    ),
    # The last absence.
    "absence": ("last alone: {since} – {ended} ({lasted}): {why}", "最近一次自治运行:{since} – {ended}({lasted}):{why}"),
    "absence_lent": (
        "  lent work: {started} started by its go, {ended} ended; usage as the supervisor measured it",
        "  已让出任务:{started} 个按既有授权启动,{ended} 个结束;用量以监护进程记录为准",
    ),
    "absence_local": ("  own work: {local} ran; never charged, never named at the hub", "  本站点自用:{local} 个运行;不计费,不上报"),
    "absence_allowance": (
        "  tenants' work by islanded allowance: {taken} taken, {refused} refused (no borrowing)",
        "  按自治额度接收租户任务:{taken} 个,拒绝 {refused} 个(不可借用)",
    ),
    "absence_told": (
        "  told: {entries} entries, all on disk at the hub {took} after it was heard",
        "  已上报:{entries} 条,恢复后 {took} 平台全部收妥",
    ),
    "absence_telling": ("  being told: {entries} entries waited when the hub was heard", "  上报中:恢复时待上报 {entries} 条"),
    "absence_settled": (
        "  settled: {settled} of {count}; each when its segments and their counts agreed at metering, by the agreement of its day",
        "  已结清:{settled}/{count};计量侧明细与计数一致时,按发生日口径结清",
    ),
    # The preview.
    "preview": ("Preview of {period} at {site} ({zone}), by this site's own record", "{site} {period} 账单预览({zone}),以本站点记录为准"),
    "preview_columns": ("JOB,ATTEMPT,POOL,FROM,RUN,CARD-HOURS,AMOUNT,", "任务,运行,资源池,开始,运行时长,卡时,金额,"),
    "preview_none": ("nothing was lent in {period}", "{period} 未让出任何资源"),
    "preview_pool": ("{pool}: {attempts} runs, {hours} card-hours", "{pool}:{attempts} 次运行,{hours} 卡时"),
    "preview_total": ("total: {hours} card-hours, {amount} by {agreement}", "合计:{hours} 卡时,{amount}(口径 {agreement})"),
    "preview_usage": ("total: {hours} card-hours; no amount: {why}", "合计:{hours} 卡时;未计价:{why}"),
    "preview_no_agreement": (
        "total: {hours} card-hours; no amount: this site's settings hold no agreement between it and the platform",
        "合计:{hours} 卡时;未计价:本站点设置中没有与平台的计量口径",
    ),
    "preview_note": ("note: {why}", "说明:{why}"),
    "preview_untold": ("{count} usage segments are not at the hub yet", "{count} 条用量明细尚未上报"),
    "preview_more": ("{count} older lines are left out; the sums hold them", "省略较早的 {count} 行;合计已包含"),
    "preview_counts": ("the hub's statement counts; this is what it will be told", "以平台账单为准;此处为将上报的用量"),
    "mark.islanded": ("islanded", "自治"),
    "mark.running": ("running", "运行中"),
    "mark.untold": ("not told yet", "未上报"),
    # Leaving.
    "leave.draining": (
        "lending is paused; waits for lent work to end: {waits}  (--now ends it as preempted)",
        "已暂停让出;等待已让出任务结束:{waits}(--now 按被抢占结束)",
    ),
    "leave.telling": ("waits until the hub holds everything: {waits}", "等待平台收妥全部记录:{waits}"),
    "leave.settling": ("waits until the hub says that these are settled: {waits}", "等待平台结清:{waits}"),
    "leave.asking": ("asks the hub to release this site", "正在请求平台解除接入"),
    "leave.away": (
        "the hub is not heard; this goes on by itself when it is. Leave with Ctrl-C, ask again with the same command",
        "未收到平台应答,恢复后自动继续。可按 Ctrl-C 退出,再次执行同一命令查看",
    ),
    "leave.receipt": ("receipt: {path}", "回执:{path}"),
    "leave.text": ("{site} has left the federation at {at}; its keys count no more", "{site} 已于 {at} 退出联邦;其密钥已失效"),
    "leave.totals": (
        "  {attempts} attempts, {hours} card-hours, {segments} usage segments in all",
        "  累计 {attempts} 次运行,{hours} 卡时,{segments} 条用量明细",
    ),
    "leave.ask": (
        "Remove keys, journal and job folders in {data}? They are not needed any more.",
        "删除 {data} 中的密钥、日志和任务目录?退出后不再需要。",
    ),
    "leave.kept": (
        "nothing was removed: {data} stays; remove it with: intertie site leave --data {data} --yes",
        "未删除任何内容:{data} 保留;删除:intertie site leave --data {data} --yes",
    ),
    "leave.removed": (
        "removed: keys, journal and job folders in {data}; the agent has ended",
        "已删除 {data} 中的密钥、日志和任务目录;接入端已结束",
    ),
    "leave.verified": ("the receipt is genuine: identity's signature fits key {key}", "回执真实:身份服务签名与公钥 {key} 相符"),
}


def say_local(key: str, /, **values: object) -> str:
    """The text of `key` in the reader's language, filled. An unknown key is our bug."""
    english, chinese = TEXTS[key]
    return (chinese if language() == "zh" else english).format(**values)
