"""What the lint of scripts says to people, in English and Chinese: `what.<kind>` names the trouble, `instead.<kind>` what to do."""

from __future__ import annotations

from collections.abc import Mapping

from intertie.text import language

TEXTS: Mapping[str, tuple[str, str]] = {
    "what.path": ("{what} is a path of one machine", "{what} 是某台机器上的路径"),
    "what.home": ("{what} lies in a home folder, which does not travel", "{what} 在家目录中,不会随任务带走"),
    "what.variable": ("{what} is set by one site's own profile", "{what} 由某个站点的环境脚本设置"),
    "what.interpreter": ("the script's interpreter is {what}", "脚本解释器是 {what}"),
    "what.output": ("{what} is not written: the log is kept whole", "不会写入 {what}:日志由平台完整保存"),
    "what.module": ("module {what}", "模块 {what}"),
    "what.environment": ("environment {what} is entered", "进入环境 {what}"),
    "what.image": ("container image {what}", "容器镜像 {what}"),
    "what.named_image": ("it runs in container image {what}", "在容器镜像 {what} 中运行"),
    "what.mpi": ("MPI plug-in {what}", "MPI 插件 {what}"),
    "what.command": ("command {what}", "命令 {what}"),
    "what.nested": ("{what} would submit to a site's own queue, beside the federation", "{what} 会绕过平台直接提交到站点队列"),
    "what.partition": ("partition {what} is one site's; it is not used", "分区 {what} 属于某个站点,不会使用"),
    "what.account": ("{what} is an account or QOS of one site; the mapped one is used", "{what} 是某个站点的账户或 QOS;使用映射账号"),
    "what.nodes": ("nodes {what} are one site's; not used", "节点 {what} 属于某个站点,不会使用"),
    "what.export": ("your environment ({what}) does not travel", "你的环境变量({what})不会随任务带走"),
    "what.late": ("{what} stands after the first command and is not read", "{what} 在第一条命令之后,不会被读取"),
    "what.function": ("exported shell functions ({what}) reach no other process here", "导出的 shell 函数({what})不会传到其他进程"),
    "what.blanks": ("blanks stand before #!, so {what} is not seen", "#! 前有空白,{what} 不会生效"),
    "what.line_ends": ("line ends of another system ({what}) are converted", "换行符({what})会被转换"),
    "instead.path": ("put it into the work folder, or name a folder that the site lends", "放进工作目录,或使用站点提供的目录"),
    "instead.home": ("put it into the work folder", "放进工作目录"),
    "instead.variable": ("write into the work folder, and bring results back with --output", "写到工作目录,用 --output 取回结果"),
    "instead.interpreter": ("use #!/bin/bash or #!/usr/bin/env NAME", "改用 #!/bin/bash 或 #!/usr/bin/env 名称"),
    "instead.output": ("read it with `intertie logs`; bring files back with --output", "用 `intertie logs` 查看;文件用 --output 取回"),
    "instead.module": ("use a container image, or choose a site that has it (--site)", "使用容器镜像,或用 --site 选择有该模块的站点"),
    "instead.environment": (
        "use a container image, or make it in the script from requirements.txt",
        "使用容器镜像,或在脚本中按 requirements.txt 创建",
    ),
    "instead.image": ("name it by a registry's reference and digest", "使用镜像仓库地址和摘要"),
    "instead.named_image": (
        "REGISTRY/NAME@sha256:… goes to every site that runs it; a tag or a file goes nowhere",
        "写成 REGISTRY/NAME@sha256:…,可运行该镜像的站点都会接收;标签或文件不会被接收",
    ),
    "instead.mpi": ("leave --mpi to the site", "由站点决定 --mpi"),
    "instead.command": (
        "choose a site that has it (--site), or guard the line: command -v {what} && …",
        "用 --site 选择有该命令的站点,或先判断:command -v {what} && …",
    ),
    "instead.nested": ("submit it as a job of its own: intertie submit SCRIPT", "作为单独的任务提交:intertie submit 脚本"),
    "instead.partition": ("insist on one with `#INTERTIE --pool SITE/POOL`", "需要指定时用 `#INTERTIE --pool 站点/资源池`"),
    "instead.account": ("nothing to do", "无需处理"),
    "instead.nodes": ("ask for what the nodes have: GPU model, memory, interconnect", "改为说明需要的 GPU 型号、显存、互联"),
    "instead.export": ("name what the job needs: --env NAME", "用 --env 名称 列出任务需要的变量"),
    "instead.late": ("move it up to the other directives", "移到脚本开头与其他指令一起"),
    "instead.function": ("put it into a file of the work folder and source that", "放进工作目录的文件中再 source"),
    "instead.blanks": ("begin the file with #!", "让文件以 #! 开头"),
    "instead.line_ends": ("nothing to do", "无需处理"),
    "exists": ("is there", "有"),
    "absent": ("absent", "没有"),
    "unknown": ("not told", "未知"),
    "every_site": ("every site: {verdict}", "各站点:{verdict}"),
    "unknown_means": (
        "not told: that site has not said what it has; it may be there or not",
        "未知:站点没有上报自己有什么,可能有,也可能没有",
    ),
    "line": ("{script}:{line}: {text}{sites}  → {instead}", "{script}:{line}:{text}{sites}  → {instead}"),
    "clean": ("nothing in the script is bound to one site", "脚本没有绑定到某个站点的内容"),
    "more": (
        "{count} more; all of them with: intertie submit --dry-run {script}",
        "还有 {count} 条;全部查看:intertie submit --dry-run {script}",
    ),
}


def say_lint(key: str, /, **values: object) -> str:
    """The text of `key` in the reader's language, filled. An unknown key is our bug."""
    english, chinese = TEXTS[key]
    return (chinese if language() == "zh" else english).format(**values)
