//! Options for a container, which override its image's configuration.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use container::bundle::config::ImageConfig;
use container::bundle::security::Profile;
use container::bundle::{Access, BundleOptions, Cpu, Network, Terminal};
use container::plan::InitChoice;
use container::root::WritableChoice;
use kernel::process::Namespace;
use rustix::fs::{FileType, Mode, OFlags};
use store::{Resolved, Store};
use transfer::StoredImage;

use crate::args::{self, NetworkKind, When};
use crate::session::context::Context;
use crate::session::settings::option_file;

/// Returns the image's configuration, which is empty for an image that never had one.
pub(crate) fn image_config(store: &Store, found: &Resolved) -> anyhow::Result<ImageConfig> {
    let Some(digest) = found.manifest else { return Ok(ImageConfig::default()) };
    Ok(ImageConfig::from_json(&StoredImage::load(store, &digest)?.config_bytes)?)
}

/// Returns whether the program gets a terminal. As in podman, `-it` without one at standard input is a remark.
pub(crate) fn terminal(context: &Context, tty: &args::Tty) -> Terminal {
    let input = std::io::stdin().is_terminal();
    match tty.when() {
        When::Always => {
            if tty.interactive && !input {
                context.remark(
                    "-it: standard input is not a terminal: its bytes count as typed, and its end as Ctrl-D",
                );
            }
            Terminal::New
        }
        When::Auto if input && std::io::stdout().is_terminal() => Terminal::New,
        When::Auto | When::Never => Terminal::None,
    }
}

/// Returns the options of the command line for a container with the id `id`.
pub(crate) fn bundle_options(
    wanted: &args::ContainerOptions,
    command: &[OsString],
    terminal: Terminal,
    id: &str,
    access: Access,
    given: GivenFiles,
) -> anyhow::Result<BundleOptions> {
    let command = command.iter().map(|argument| {
        let text = argument.to_str().map(ToOwned::to_owned);
        text.with_context(|| format!("argument {argument:?} is not UTF-8, which runtimes need"))
    });
    let hostname = wanted.names.hostname.clone().unwrap_or_else(|| id.to_owned());
    // The host name also becomes a word of `/etc/hosts`. Source of the length: Linux `__NEW_UTS_LEN`.
    let is_good = |it: u8| it.is_ascii_alphanumeric() || b"-._".contains(&it);
    if hostname.is_empty() || hostname.len() > 64 || !hostname.bytes().all(is_good) {
        bail!(
            "\"{}\" is not a host name: use 1 to 64 letters, digits, `-`, `_` and `.`",
            hostname.escape_debug()
        );
    }
    Ok(BundleOptions {
        command: command.collect::<anyhow::Result<_>>()?,
        entrypoint: wanted.entrypoint.as_deref().map(entrypoint),
        env: given.env,
        working_dir: wanted.program.workdir.clone(),
        terminal,
        network: match &wanted.network {
            None | Some(NetworkKind::None) => Network::None,
            Some(NetworkKind::Host) => Network::Host,
            Some(NetworkKind::Pasta | NetworkKind::PastaWith(_)) => Network::Pasta,
            Some(NetworkKind::Joined(path)) => Network::Joined(network_namespace(path)?),
            Some(NetworkKind::Named(_)) => Network::Named,
            Some(NetworkKind::Container(name)) => Network::Container(name.clone()),
        },
        access,
        is_limited: wanted.has_limits(),
        memory: wanted.memory_limit(),
        pids: crate::verbs::containers::security::pids(&wanted.security)?,
        cpu: Cpu {
            quota: wanted.cpu.cpus,
            shares: wanted.cpu.cpu_shares,
            cpus: wanted.cpu.cpuset_cpus.clone(),
        },
        security: crate::verbs::containers::security::security(&wanted.security, given.profile)?,
        process: wanted.process.wish()?,
        ..BundleOptions::new(hostname)
    })
}

/// Returns the absolute path of a network namespace, or an error if the file is not one.
fn network_namespace(path: &Path) -> anyhow::Result<String> {
    let shown = path.display();
    let failed = || format!("--network ns:{shown}: cannot join it");
    // Open with O_PATH, because the file may be of any type.
    let file = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let file = file.with_context(failed)?;
    // Source: Linux `include/uapi/linux/magic.h`, NSFS_MAGIC.
    if rustix::fs::fstatfs(&file).with_context(failed)?.f_type != 0x6e73_6673 {
        bail!(
            "--network ns:{shown} is {}, not a namespace: `ip netns add NAME` makes one at \
            /run/netns/NAME, and that of a process is /proc/PID/ns/net",
            what(&file)?
        );
    }
    let file = std::fs::File::open(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let kind = kernel::process::namespace_kind(file.with_context(failed)?.as_fd());
    match kind.with_context(failed)? {
        Some(Namespace::Network) => {}
        Some(kind) => {
            let kind = format!("{kind:?}").to_lowercase();
            bail!("--network ns:{shown} is a namespace of kind {kind}, not a network namespace")
        }
        None => bail!("--network ns:{shown} is not a network namespace"),
    }
    let absolute = std::path::absolute(path).with_context(failed)?.into_os_string();
    absolute
        .into_string()
        .map_err(|path| anyhow!("path {path:?} is not UTF-8, which runtimes need"))
}

fn what(file: &OwnedFd) -> anyhow::Result<&'static str> {
    let stat = rustix::fs::fstat(file)?;
    Ok(match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => "a file",
        FileType::Directory => "a directory",
        FileType::Socket => "a socket",
        FileType::Fifo => "a pipe",
        _ => "a device",
    })
}

/// Returns the init that the options ask for.
pub(crate) fn init_wish(wanted: &args::ContainerOptions) -> InitChoice {
    match &wanted.init_path {
        // A later start may have another working directory.
        Some(path) => InitChoice::Program(std::path::absolute(path).unwrap_or(path.clone())),
        None if wanted.init => InitChoice::Any,
        None => InitChoice::None,
    }
}

/// Returns the writable layer that the options ask for; `None` means the default.
pub(crate) fn wish(wanted: &args::ContainerOptions) -> Option<&WritableChoice> {
    if wanted.read_only { Some(&WritableChoice::None) } else { wanted.writable.as_ref() }
}

/// Returns the writable layer of a new container. `store` is the path of the store if the container gets a folder
/// there.
pub(crate) fn writable_wish(
    context: &Context,
    wanted: &args::ContainerOptions,
    store: Option<&Path>,
) -> WritableChoice {
    let remark = |text: &str| context.remark(text);
    let default = || WritableChoice::default_of(context.who(), store, &context.search(), &remark);
    wish(wanted).cloned().unwrap_or_else(default).within(wanted.memory_limit())
}

/// Describes the default writable layer of `run`, with the reason if it is not the usual one.
pub(crate) fn describe_writable(context: &Context) -> String {
    let reasons = RefCell::new(Vec::new());
    let note = |text: &str| reasons.borrow_mut().push(text.to_owned());
    let disk = disk(context);
    let kind = match WritableChoice::default_of(
        context.who(),
        disk.as_deref(),
        &context.search(),
        &note,
    ) {
        WritableChoice::Folder(..) => return "dir: a directory on the store's disk".to_owned(),
        WritableChoice::Filestore(..) => "self: one file with an ext4 inside",
        _ => "memory",
    };
    let why = match disk {
        Some(_) => "the file system of the store does not support overlays",
        None => "systemd-nsresourced assigns the ids of containers, and files cannot keep them",
    };
    let reasons =
        reasons.into_inner().into_iter().fold(why.to_owned(), |all, it| format!("{all}; {it}"));
    format!("{kind}, since {reasons}")
}

/// Returns the store's directory if containers of this user can store their changes there.
pub(crate) fn disk(context: &Context) -> Option<PathBuf> {
    let can_stay = crate::session::own_namespace::changes_can_stay(context.outside());
    context.store_directory().ok().filter(|_| can_stay)
}

/// Contents of the files that the command line names.
#[derive(Debug)]
pub(crate) struct GivenFiles {
    env: Vec<String>,
    profile: Option<Profile>,
    labels: BTreeMap<String, String>,
}

impl GivenFiles {
    /// Reads the files. One may be a pipe without a writer, so this is called while signals still end the process.
    pub(crate) fn read(wanted: &args::ContainerOptions) -> anyhow::Result<Self> {
        let env = environment(&wanted.program)?;
        let profile = crate::verbs::containers::security::profile(&wanted.security)?;
        Ok(Self { env, profile, labels: BTreeMap::new() })
    }

    /// Also reads the files with labels of a new container.
    pub(crate) fn with_labels(self, labels: &args::Labels) -> anyhow::Result<Self> {
        Ok(Self { labels: labels.read()?, ..self })
    }

    /// Takes the labels of a new container.
    pub(crate) fn take_labels(&mut self) -> BTreeMap<String, String> {
        std::mem::take(&mut self.labels)
    }
}

/// Returns the variables of files, followed by those of the command line. A name without a value gets the caller's
/// value. A file may be a pipe without a writer, so this function is called while signals still end the process.
pub(crate) fn environment(program: &args::Program) -> anyhow::Result<Vec<String>> {
    let mut env = Vec::new();
    for path in &program.env_file {
        let failed = || format!("--env-file {}", path.display());
        let bytes = option_file::read(path).with_context(failed)?;
        let text = String::from_utf8(bytes).ok().context("it is not UTF-8, which runtimes need");
        env.extend(variables(&text.with_context(failed)?, &of_caller).with_context(failed)?);
    }
    for variable in &program.env {
        match variable.split_once('=') {
            // The value may be a secret, so it is not printed.
            Some(("", _)) => bail!("--env: a variable has no name before the ="),
            Some(_) => env.push(variable.clone()),
            None => env.extend(of_caller(variable)?),
        }
    }
    Ok(env)
}

/// Returns the caller's variable of this name, if there is one.
fn of_caller(name: &str) -> anyhow::Result<Option<String>> {
    let Some(value) = std::env::var_os(name) else { return Ok(None) };
    let value = value.into_string().ok();
    let value = value.with_context(|| format!("variable {name} is not UTF-8"))?;
    Ok(Some(format!("{name}={value}")))
}

/// Parses the variables of a file: each line is NAME=VALUE, or NAME for the caller's value. Only blanks before the
/// name are removed; quotes are part of the value. A byte order mark at the beginning, as Windows writes it, is
/// removed. Empty lines and lines that begin with # are skipped. Source: podman `pkg/env/env.go`, `ParseFile`.
fn variables(
    text: &str,
    of_caller: &dyn Fn(&str) -> anyhow::Result<Option<String>>,
) -> anyhow::Result<Vec<String>> {
    let mut env = Vec::new();
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start_matches([' ', '\t']);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        // A variable is a string that ends with a NUL. Source: environ(7).
        if line.contains('\0') {
            bail!("line {} has a NUL byte, which variables cannot contain", index + 1);
        }
        match line.split_once('=') {
            // The line may be a secret, so it is not printed.
            Some(("", _)) => bail!("line {} has no name before the =", index + 1),
            Some(_) => env.push(line.to_owned()),
            None => env.extend(of_caller(line)?),
        }
    }
    Ok(env)
}

/// Parses a value of `--entrypoint`: a program, or a JSON array with its arguments, as in podman. An empty value
/// removes the image's entrypoint.
fn entrypoint(text: &str) -> Vec<String> {
    match serde_json::from_str::<Vec<String>>(text) {
        Ok(words) => words,
        Err(_) if text.is_empty() => Vec::new(),
        Err(_) => vec![text.to_owned()],
    }
}

#[cfg(test)]
mod tests {
    /// Source: podman-run(1), `--entrypoint`.
    #[test]
    fn an_entrypoint_is_a_program_or_a_list() {
        let cases: [(&str, &[&str]); 6] = [
            ("", &[]),
            ("[]", &[]),
            ("/bin/sh", &["/bin/sh"]),
            (r#"["/bin/echo", "a b"]"#, &["/bin/echo", "a b"]),
            ("[", &["["]),
            ("[1]", &["[1]"]),
        ];
        for (text, expect) in cases {
            assert_eq!(super::entrypoint(text), expect, "{text}");
        }
    }

    use super::*;

    #[test]
    fn variables_of_a_file() {
        let of_caller = |name: &str| Ok((name == "OWN").then(|| "OWN=mine".to_owned()));
        let check = |text: &str, expect: &[&str]| {
            assert_eq!(variables(text, &of_caller).unwrap(), expect, "{text:?}");
        };
        check("", &[]);
        check("A=1\nB=2\n", &["A=1", "B=2"]);
        check("A=1\r\n\r\nB=\r\n", &["A=1", "B="]);
        check("# no\n  # no\n\t A= b # c \nX='q'", &["A= b # c ", "X='q'"]);
        check("OWN\nABSENT\n", &["OWN=mine"]);
        check("A=b=c", &["A=b=c"]);
        for text in ["=secret", "A=1\n  =secret"] {
            let error = variables(text, &of_caller).unwrap_err().to_string();
            assert!(error.contains("has no name") && !error.contains("secret"), "{error}");
        }
        check("\u{feff}A=1\nB=\u{feff}\n", &["A=1", "B=\u{feff}"]);
        check("\u{feff}# no\n", &[]);
        for text in ["\nA=secret\0B=2", "A=1\nsecret\0", "A=1\nse\0cret=1"] {
            let error = variables(text, &of_caller).unwrap_err().to_string();
            assert_eq!(error, "line 2 has a NUL byte, which variables cannot contain", "{text:?}");
        }
    }
}
