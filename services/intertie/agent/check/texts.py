"""What the pre-flight says, in English and Chinese: `what.<noun>` heads a line, `<noun>.<case>` is its text, `fix.<case>` mends it."""

from __future__ import annotations

from collections.abc import Mapping

from intertie.text import language

TEXTS: Mapping[str, tuple[str, str]] = {
    "what.check": ("check", "检查"),
    "what.version": ("versions", "版本"),
    "what.user": ("user", "运行身份"),
    "what.account": ("account {account}", "账号 {account}"),
    "what.folder": ("data folder", "数据目录"),
    "what.disk": ("disk", "磁盘"),
    "what.agent": ("agent", "接入端"),
    "what.rules": ("site.toml", "site.toml"),
    "what.joined": ("federation", "联邦"),
    "what.proxy": ("proxy", "代理"),
    "what.gateway": ("gateway", "网关"),
    "what.clock": ("clock", "时钟"),
    "what.bus": ("bus", "总线"),
    "what.pool": ("pool {pool}", "资源池 {pool}"),
    "what.cards": ("cards", "加速卡"),
    "what.slurm": ("slurm", "slurm"),
    "what.queue": ("queue {queue}", "队列 {queue}"),
    "check.slow": ("{name} did not end within {limit:.0f} s", "{name} 未在 {limit:.0f} 秒内结束"),
    "check.broke": ("{name} could not be made: {error}", "无法执行 {name}:{error}"),
    "version.ok": (
        "agent {version} · Python {python} · {system} {machine} · kernel {kernel} · {libc}",
        "接入端 {version} · Python {python} · {system} {machine} · 内核 {kernel} · {libc}",
    ),
    "version.libc": (
        "{libc} is older than 2.17, the oldest that prebuilt parts are made for",
        "{libc} 早于 2.17,预编译部件不支持",
    ),
    "user.root": ("root: each tenant's work runs as its mapped account", "root:每个租户的任务以其映射账号运行"),
    "user.single": (
        "not root: single-user mode, the owner's own tenant only",
        "非 root:单用户模式,只接受所有者自己的租户",
    ),
    "account.ok": ("is mapped for tenant {tenant}, and jobs may run as it", "映射给租户 {tenant},任务可以使用"),
    "account.not": ("is mapped for tenant {tenant}: {why}", "映射给租户 {tenant}:{why}"),
    "account.none": ("no tenant is mapped here: no federation work is taken", "没有映射任何租户:不接受联邦任务"),
    "account.unasked": ("mappings are known to a running agent only", "只有运行中的接入端知道映射"),
    "folder.none": ("{folder} is not there yet", "{folder} 尚不存在"),
    "folder.ok": ("{folder}: keys are the agent's alone", "{folder}:密钥仅接入端可读"),
    "folder.mode": ("{path} has mode {mode:o}, and must have {wanted:o}", "{path} 权限为 {mode:o},应为 {wanted:o}"),
    "folder.owner": ("{path} belongs to another user than the one that runs this", "{path} 属于另一个用户"),
    "folder.closed": ("jobs' accounts cannot pass {path} (mode {mode:o})", "任务账号无法进入 {path}(权限 {mode:o})"),
    "disk.ok": ("{free} MiB free below {where}", "{where} 剩余 {free} MiB"),
    "disk.low": ("{text}", "{text}"),
    "disk.inodes": ("{free} files can still be made below {where}", "{where} 还可创建 {free} 个文件"),
    "agent.runs": ("runs, version {version}; the hub is heard", "运行中,版本 {version};与平台连接正常"),
    "agent.islanded": ("runs, version {version}; islanded since {since} ({why})", "运行中,版本 {version};{since} 起自治运行({why})"),
    "agent.other": (
        "runs version {version}; {installed} is installed here",
        "运行版本 {version};已安装 {installed}",
    ),
    "agent.lane": ("lane {lane}: {state}", "通道 {lane}:{state}"),
    "agent.not": ("does not run", "未运行"),
    "agent.denied": ("runs, and does not answer this user", "运行中,但不回应当前用户"),
    "rules.bad": ("{error}", "{error}"),
    "joined.no": ("this machine has not joined a hub", "本机尚未加入平台"),
    "joined.yes": ("joined as {site}", "已加入,站点 {site}"),
    "proxy.none": ("none is named: hub and bus are reached straight", "未配置:直接连接平台和总线"),
    "proxy.ok": ("{url} leads to the gateway", "经 {url} 访问网关"),
    "proxy.down": ("{url} is not reached: {error}", "无法连接 {url}:{error}"),
    "proxy.bad": ("{error}", "{error}"),
    "gateway.none": ("no hub is named", "未指定平台"),
    "gateway.ok": ("{url} answers in {ms:.0f} ms, version {version}", "{url} 响应 {ms:.0f} 毫秒,版本 {version}"),
    "gateway.down": ("{url} is not reached: {error}", "无法访问 {url}:{error}"),
    "gateway.odd": ("{url} answers {status}, and not as a hub does", "{url} 返回 {status},不是平台网关"),
    "clock.ok": ("{offset:+.1f} s against the hub's (±{error:.1f} s)", "与平台相差 {offset:+.1f} 秒(±{error:.1f} 秒)"),
    "clock.off": ("{offset:+.1f} s against the hub's (±{error:.1f} s)", "与平台相差 {offset:+.1f} 秒(±{error:.1f} 秒)"),
    "clock.unknown": ("the hub's clock was not told", "平台未给出时间"),
    "bus.ok": ("{url}: logged in within {ms:.0f} ms{how}", "{url}:{ms:.0f} 毫秒登录成功{how}"),
    "bus.down": ("{url}: {error}", "{url}:{error}"),
    "bus.some": ("{url}: {error}; another address works", "{url}:{error};其他地址可用"),
    "pool.ok": ("{declared} × {model} declared, {seen} seen", "声明 {declared} × {model},可见 {seen}"),
    "pool.fewer": ("{declared} × {model} declared, only {seen} seen", "声明 {declared} × {model},仅可见 {seen}"),
    "pool.memory": ("{declared} MiB a card declared, {seen} MiB seen", "声明每卡 {declared} MiB,可见 {seen} MiB"),
    "pool.slots": ("{declared} CPU slots declared, this machine has {seen} CPUs", "声明 {declared} 个 CPU 槽位,本机有 {seen} 个 CPU"),
    "pool.elsewhere": (
        "{declared} × {model}: not on this machine, told by the site's own queue",
        "{declared} × {model}:不在本机,由站点队列提供",
    ),
    "cards.none": ("none are seen: {why}", "没有可见的加速卡:{why}"),
    "cards.odd": ("could not be read: {why}", "无法读取:{why}"),
    "cards.unnamed": ("{count} × {model} are seen and in no pool", "可见 {count} × {model},未归入任何资源池"),
    "slurm.none": ("no Slurm commands here", "本机没有 Slurm 命令"),
    "slurm.ok": ("{version}", "{version}"),
    "slurm.ping": ("{said}", "{said}"),
    "slurm.down": ("{command} left with {code}: {said}", "{command} 返回 {code}:{said}"),
    "slurm.books": ("accounting answers", "记账服务可用"),
    "queue.ok": ("{state}, {nodes} nodes", "{state},{nodes} 个节点"),
    "queue.down": ("{state}, {nodes} nodes", "{state},{nodes} 个节点"),
    "fix.libc": ("choose a newer machine for the agent; it needs not be a compute node", "把接入端放在较新的机器上;不必是计算节点"),
    "fix.single": ("run the agent as root, or let its site's own queue change accounts", "以 root 运行接入端,或由站点队列切换账号"),
    "fix.account": (
        "make the account (useradd --system {account}), or map another: intertie tenant map TENANT SITE ACCOUNT",
        "创建账号(useradd --system {account}),或改用:intertie tenant map 租户 站点 账号",
    ),
    "fix.map": ("ask the hub's operator: intertie tenant map TENANT SITE ACCOUNT", "请平台运营方执行:intertie tenant map 租户 站点 账号"),
    "fix.start": ("intertie-agent run --data {folder}", "intertie-agent run --data {folder}"),
    "fix.mode": ("chmod {wanted:o} {path}", "chmod {wanted:o} {path}"),
    "fix.owner": ("call this as the agent's own user, or chown -R it to that user", "以接入端的用户执行,或用 chown -R 改为该用户"),
    "fix.closed": ("chmod o+x {path}, or choose another --data", "chmod o+x {path},或换一个 --data"),
    "fix.disk": ("free space below {where}, or lower disk_floor_mib in site.toml", "清理 {where},或调低 site.toml 的 disk_floor_mib"),
    "fix.upgrade": ("intertie-agent upgrade", "intertie-agent upgrade"),
    "fix.rules": ("correct {file}", "修正 {file}"),
    "fix.join": (
        "intertie-agent join --hub URL --token-file FILE --profile pools.toml",
        "intertie-agent join --hub URL --token-file 文件 --profile pools.toml",
    ),
    "fix.proxy": (
        "see `proxy` of [link] in site.toml, or HTTPS_PROXY and NO_PROXY",
        "检查 site.toml 的 [link] proxy,或 HTTPS_PROXY 与 NO_PROXY",
    ),
    "fix.hub": ("name it: --hub URL", "用 --hub URL 指定"),
    "fix.gateway": (
        "see that this machine may open {host}:{port} (curl -v {url}/healthz), or name a proxy in site.toml",
        "确认本机可访问 {host}:{port}(curl -v {url}/healthz),或在 site.toml 中配置代理",
    ),
    "fix.clock": (
        "synchronise the clock: timedatectl set-ntp true (or chronyc makestep)",
        "同步时钟:timedatectl set-ntp true(或 chronyc makestep)",
    ),
    "fix.bus": (
        "open it outward, name a proxy in site.toml, or ask the operator for a wss:// address",
        "放行出站访问,或在 site.toml 配置代理,或向运营方索取 wss:// 地址",
    ),
    "fix.pool": ("correct {file}, or find the missing cards (nvidia-smi -L)", "修正 {file},或查找缺失的卡(nvidia-smi -L)"),
    "fix.profile": (
        "put them into a pool: intertie-agent check --detect pools.toml",
        "归入资源池:intertie-agent check --detect pools.toml",
    ),
    "fix.cards": ("nvidia-smi says more", "nvidia-smi 可查看详情"),
    "fix.slurm": ("see that this user may ask slurmctld: scontrol ping", "确认当前用户可访问 slurmctld:scontrol ping"),
    "fix.books": (
        "see slurmdbd: sacctmgr show cluster; without it usage is not reconciled",
        "检查 slurmdbd:sacctmgr show cluster;否则无法对账",
    ),
    "fix.queue": (
        "scontrol update PartitionName={queue} State=UP, when it may serve",
        "可用时:scontrol update PartitionName={queue} State=UP",
    ),
}


def said(key: str, values: Mapping[str, object]) -> str:
    """The text of `key` in the reader's language, filled."""
    english, chinese = TEXTS[key]
    return (chinese if language() == "zh" else english).format(**values)
