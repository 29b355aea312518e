//! Advice for commands and options of podman and docker that Quire lacks.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::verbs::command_words::UnusedLine;

/// Verbs of podman and docker that Quire lacks, with alternatives.
const VERBS: &[(&[&str], &str)] = &[
    (&["init"], "`quire create` makes a container, and `quire start` starts it"),
    (
        &["top"],
        "use `quire exec CONTAINER ps`, or `ps` of the host: `quire ps --json` has the number of the first process",
    ),
    (
        &["stats"],
        "Quire has no stats: `systemd-cgtop` shows each container as quire-NAME-…, and `quire du` \
        the disk",
    ),
    (&["prune"], "use `quire system prune`, or `quire gc` for data that no image needs"),
    (
        &["rename"],
        "a container keeps its name: choose it with `quire run --name NAME`; `quire tag` names images",
    ),
    (
        &["update"],
        "a container keeps its limits: remove it with `quire rm -f`, and `quire run` it with others",
    ),
    (
        &["pause", "unpause"],
        "use `quire stop CONTAINER`; `quire commit` and `quire diff` pause a container by themselves",
    ),
    (&["events"], "Quire has no events: `quire wait CONTAINER` returns when a container ends"),
    (&["search"], "search the registry's web site, then use `quire pull NAME`"),
    (&["trust"], "use `quire sign NAME --key FILE`, and `quire show NAME`, which lists signatures"),
    (
        &["manifest"],
        "use `quire show --json NAME`, which has the manifest, or `quire referrers NAME` for \
        signatures and SBOMs; buildah makes manifest lists",
    ),
    (
        &["buildx", "builder"],
        "Quire does not build Dockerfiles: use buildah or BuildKit, and `quire import oci:DIR`",
    ),
    (
        &["unshare"],
        "use `unshare --user --map-auto --map-root-user COMMAND`, a program of util-linux",
    ),
    (&["context"], "Quire has no daemon: --store names another store"),
    (
        &["pod", "compose", "play", "kube", "swarm", "stack", "service", "node"],
        "Quire has no pods: --network NAME connects several containers (`quire network create`), \
        and a service manager starts them",
    ),
];

/// Options of podman and docker that Quire lacks: the verbs (an empty list means all others), the options, and what
/// to do instead. The first matching row counts.
const OPTIONS: &[(&[&str], &[&str], &str)] = &[
    (
        RUN,
        &["-P", "--publish-all", "--expose"],
        "publish each port separately: use `-p HOST:CONTAINER`",
    ),
    (RUN, &["--link", "--pod"], SHARED_NETWORK),
    (
        RUN,
        &["--ip6", "--mac-address"],
        "the host chooses the container's addresses: leave this out",
    ),
    (
        &["bundle"],
        &["--restart"],
        "the program that runs the bundle starts it again: leave this out",
    ),
    (&["run", "create"], &["--annotation"], "containers have no annotations: use --label"),
    (
        &["bundle"],
        &["-l", "--label", "--label-file", "--annotation"],
        "edit the annotations in the config.json of the bundle",
    ),
    (
        RUN,
        &[
            "--cpu-quota",
            "--cpu-period",
            "--cpuset-mems",
            "--memory-swap",
            "--memory-reservation",
            "--blkio-weight",
            "--memory-swappiness",
            "--kernel-memory",
            "--oom-kill-disable",
            "--cpu-rt-period",
            "--cpu-rt-runtime",
            "--device-read-bps",
            "--device-write-bps",
        ],
        "this limit does not exist: use --memory, --cpus or --pids-limit",
    ),
    (RUN, &["-c"], "use --cpu-shares"),
    (
        RUN,
        &["--pid", "--ipc", "--uts", "--cgroupns", "--cgroups", "--cgroup-parent"],
        "a container always has its own namespaces and cgroup: leave this out; `quire exec` starts a \
        program in those of a running container",
    ),
    (&["run", "create"], &["--arch", "--os", "--variant"], "use `--platform linux/ARCHITECTURE`"),
    (
        &["bundle"],
        &["--platform", "--arch", "--os", "--variant"],
        "use `quire pull --platform linux/ARCHITECTURE IMAGE` first",
    ),
    (RUN, &["--rootfs"], "use `quire import dir:DIR NAME` first"),
    (RUN, &["--device-cgroup-rule"], "use `--device PATH` for each device file"),
    (RUN, &["--http-proxy"], "no variables of the host are passed on: use `-e http_proxy`"),
    (RUN, &["--env-host"], "use `-e NAME` for each variable of the host"),
    (
        RUN,
        &[
            "--health-cmd",
            "--health-interval",
            "--health-retries",
            "--health-timeout",
            "--no-healthcheck",
        ],
        "Quire has no health checks: run a check with `quire exec`",
    ),
    (
        &["bundle"],
        &["--log-driver", "--log-opt"],
        "the program that runs the bundle keeps its output",
    ),
    (
        &["create"],
        &["-a", "--attach", "--sig-proxy", "--detach-keys"],
        "`quire start --attach` prints the output: leave this out",
    ),
    (RUN, &["--volumes-from"], "use `-v` with the same directory for both"),
    (RUN, &["--gpus"], "use `--device PATH` for each device file of the GPU"),
    (RUN, &["--secret"], "use `-v FILE:/run/secrets/NAME:ro`"),
    (RUN, &["--domainname"], "use `--hostname HOST.DOMAIN`"),
    (RUN, &["--storage-opt"], "use `--writable dir,size=SIZE`"),
    (RUN, &["--rmi"], "use `quire rmi` afterwards"),
    (RUN, &["--pidfile"], "`quire ps --json` has the number of the first process"),
    (
        &["attach", "exec", "inspect", "kill", "port"],
        &["-l", "--latest"],
        "name the container: `quire ps` lists all",
    ),
    (
        &["cp"],
        &["-L", "--follow-link"],
        "a link at the end of a path is always followed: leave this out",
    ),
    (&["system"], &["-v"], "use `quire du`, and `quire ps --all --size`"),
    (&["show"], &["-f", "--format"], "use `quire inspect --format TEMPLATE NAME`"),
    (
        &["push"],
        &["--sign-by", "--sign-by-sigstore"],
        "use --sign-by-sigstore-private-key FILE, with a key of cosign, skopeo or openssl",
    ),
    (&["pull", "push"], &["-a", "--all-tags"], "use one command for each tag, with IMAGE:TAG"),
    (
        &["export"],
        &["-o", "--output"],
        "use `quire export CONTAINER changes:FILE`, or `quire commit CONTAINER NAME` and `quire \
        export NAME tar:FILE`",
    ),
    (&["rmi"], &["-a", "--all"], "use `quire rmi -f $(quire images -q)`"),
    (
        &["start"],
        &["-t", "--tty"],
        "a container has the standard input and the terminal with which it was made: `quire exec -it CONTAINER sh` \
        gives a command both",
    ),
    (
        &["create"],
        &["-d", "--detach"],
        "leave this out: the container runs in the background when `quire start` starts it",
    ),
    (&["start"], &["--sig-proxy", "--detach-keys", "--checkpoint"], "leave this out"),
    (
        &["build"],
        &["-t", "--tag", "-f", "--file", "--build-arg"],
        "Quire does not build Dockerfiles: use buildah, and `quire import oci:DIR`",
    ),
    (&[], &["-q"], "use --quiet"),
    (&[], &["-v", "-vv"], "use --verbose"),
];

/// Verbs that docker and podman call without an argument that Quire needs, and what to do.
const INCOMPLETE: &[(&str, &str)] = &[
    (
        "build",
        "Quire does not build Dockerfiles: use buildah or BuildKit, and `quire import oci:DIR`; \
        `quire build SOURCE FILE` writes an EROFS image",
    ),
    (
        "export",
        "name a target: `quire export NAME tar:FILE` for an image, `quire export CONTAINER \
        changes:FILE` for a container",
    ),
    ("login", "name the registry: `quire login docker.io`"),
    ("logout", "name the registry: `quire logout docker.io`"),
];

/// The alternative to changing a running container's networks.
const NETWORK_ACTION: &str = "a running container keeps its networks: join all of them at the \
    start by `quire run --network NAME,NAME`";

/// How containers share a network.
const SHARED_NETWORK: &str = "use `--network container:NAME` to share the network of a running container, which then \
    has the address 127.0.0.1";

/// Verbs that make a container.
const RUN: &[&str] = &["run", "create", "bundle"];

/// Replaces clap's usage by the complete usage of the verb, because clap's lists set environment variables as given
/// options.
pub(crate) fn whole_usage(error: &mut clap::Error, line: &UnusedLine) -> Option<()> {
    error.get(ContextKind::Usage)?;
    let mut command = crate::verbs::help::explained();
    command.build();
    let usage = command.find_subcommand_mut(line.verb()?)?.render_usage();
    error.insert(ContextKind::Usage, ContextValue::StyledStr(usage));
    Some(())
}

/// Names the environment variable in the error instead of the option if the invalid value came from the variable.
pub(crate) fn blame_variable(error: &mut clap::Error, line: &UnusedLine) -> Option<()> {
    if error.kind() != ErrorKind::InvalidValue {
        return None;
    }
    let Some(ContextValue::String(said)) = error.get(ContextKind::InvalidArg) else { return None };
    let long = said.split(' ').next()?.strip_prefix("--")?.to_owned();
    let was_given = line.read().has(&long);
    let command = crate::verbs::command();
    let verb = line.verb().and_then(|it| command.find_subcommand(it));
    let mut options =
        command.get_arguments().chain(verb.into_iter().flat_map(|it| it.get_arguments()));
    let variable = options.find(|it| it.get_long() == Some(&long))?.get_env()?;
    if !was_given {
        let variable = variable.to_string_lossy().into_owned();
        error.insert(ContextKind::InvalidArg, ContextValue::String(variable));
    }
    Some(())
}

/// Returns advice for a command line that clap rejected, if the tables have some.
pub(crate) fn advice(error: &clap::Error, line: &UnusedLine) -> Option<String> {
    let said = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let verb = said(ContextKind::InvalidSubcommand)?;
            let (_, advice) = VERBS.iter().find(|(verbs, _)| verbs.contains(&verb))?;
            Some(format!("unknown command \"{verb}\": {advice}"))
        }
        ErrorKind::UnknownArgument => {
            let option = said(ContextKind::InvalidArg)?;
            // Such as `-d=true`: clap takes `=` for an option.
            if option == "-=" {
                let (option, value) = line.letters_with_value()?;
                return without_value(&option, &value);
            }
            let verb = line.verb();
            let advice = of_option(verb, option)?;
            Some(format!("unknown option {option}: {advice}"))
        }
        ErrorKind::InvalidValue if line.verb() == Some("network") => {
            let action = said(ContextKind::InvalidValue)?;
            let is_known = ["connect", "disconnect", "reload", "update"].contains(&action);
            is_known.then(|| format!("unknown action \"{action}\" of network: {NETWORK_ACTION}"))
        }
        // Such as `--rm=true`.
        ErrorKind::TooManyValues => {
            let option = said(ContextKind::InvalidArg)?.split(' ').next()?;
            without_value(option, said(ContextKind::InvalidValue)?)
        }
        ErrorKind::MissingRequiredArgument => {
            // Missing options have other advice.
            let is_positional = match error.get(ContextKind::InvalidArg)? {
                ContextValue::Strings(names) => names.iter().any(|it| it.starts_with('<')),
                ContextValue::String(name) => name.starts_with('<'),
                _ => false,
            };
            let verb = line.verb().filter(|_| is_positional)?;
            let (_, advice) = INCOMPLETE.iter().find(|(name, _)| *name == verb)?;
            Some(format!("{verb}: {advice}"))
        }
        _ => None,
    }
}

/// Returns advice for a Boolean option with a value. Source of the values: Go's `strconv.ParseBool`.
fn without_value(option: &str, value: &str) -> Option<String> {
    match value {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => {
            Some(format!("{option} takes no value: write {option}"))
        }
        "0" | "f" | "F" | "FALSE" | "false" | "False" => {
            Some(format!("{option} takes no value: leave it out"))
        }
        _ => None,
    }
}

fn of_option(verb: Option<&str>, option: &str) -> Option<&'static str> {
    let verb = verb.unwrap_or_default();
    let fits = |verbs: &[&str]| verbs.is_empty() || verbs.contains(&verb);
    let mut rows = OPTIONS.iter().filter(|(verbs, options, _)| {
        let long = option.split('=').next().unwrap_or(option);
        fits(verbs) && options.contains(&long)
    });
    rows.next().map(|(_, _, advice)| *advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row for a verb or option that exists would never be used.
    #[test]
    fn what_is_there_has_no_row() {
        let mut command = crate::verbs::command();
        command.build();
        let verbs: Vec<_> = command
            .get_subcommands()
            .flat_map(|it| std::iter::once(it.get_name()).chain(it.get_all_aliases()))
            .collect();
        for verb in VERBS.iter().flat_map(|(verbs, _)| *verbs) {
            assert!(!verbs.contains(verb), "{verb}");
        }
        let mut seen = 0;
        for (verbs, options, _) in OPTIONS {
            for verb in *verbs {
                let verb = command.find_subcommand(verb).expect("a verb of ours");
                for option in verb.get_arguments() {
                    let short = option.get_short_and_visible_aliases().unwrap_or_default();
                    let short = short.iter().map(|it| format!("-{it}"));
                    let long = option.get_long_and_visible_aliases().unwrap_or_default();
                    let long = long.iter().map(|it| format!("--{it}"));
                    for word in short.chain(long) {
                        seen += 1;
                        let is_there = options.contains(&word.as_str());
                        assert!(!is_there, "{}: {word}", verb.get_name());
                    }
                }
            }
        }
        assert!(seen > 100, "{seen}");
    }

    #[test]
    fn the_first_row_that_fits_counts() {
        let check = |verb, option, expect| {
            let found = of_option(verb, option);
            assert!(found.is_some_and(|it| it.contains(expect)), "{verb:?} {option}: {found:?}");
        };
        check(Some("run"), "-P", "publish each port");
        check(Some("run"), "--expose=80", "publish each port");
        check(Some("wait"), "-v", "--verbose");
        check(Some("pull"), "-v", "--verbose");
        check(None, "-q", "--quiet");
        assert_eq!(of_option(Some("pull"), "-p"), None);
    }
}
