//! `login`: checks credentials with a registry and saves them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, bail};
use clap::Args;
use oci::registry::{Checked, Kept, Login as Attempt, Secret};
use oci::signing::read_secret;
use serde::Serialize;

use crate::Answer;
use crate::args::RegistryOptions;
use crate::output::report;
use crate::session::context::Context;
use crate::session::prompt::Terminal;
use crate::session::signals::until_signal;
use crate::verbs::VerbArgs;
use crate::verbs::images::registry::credentials::{KeptReport, SavedOption, target};

// The registry, and how to get the credentials.
#[derive(Debug, Args)]
pub(crate) struct Login {
    /// The registry, such as docker.io, ghcr.io or localhost:5000
    pub(crate) host: String,
    /// User name; Quire asks for it if it is not given
    #[arg(short, long = "username", value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Read the password, or a token, from standard input instead of asking for it
    #[arg(long, requires = "user")]
    pub(crate) password_stdin: bool,
    /// The password. Other users of the machine can see it for a moment: --password-stdin hides it
    #[arg(
        short,
        long,
        value_name = "PASSWORD",
        requires = "user",
        conflicts_with = "password_stdin"
    )]
    pub(crate) password: Option<String>,
    /// Print the user name that is saved for the registry
    #[arg(long, conflicts_with_all = ["user", "password", "password_stdin"])]
    pub(crate) get_login: bool,
    #[command(flatten)]
    pub(crate) saved: SavedOption,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

impl VerbArgs for Login {
    const NAME: &'static str = "login";
    const ABOUT: &'static str = "Check a user name and password with a registry, and save them";
    const DETAILS: &'static str = "Quire saves them with the credential helper that a credentials \
        file names for the registry. Without a helper it writes $REGISTRY_AUTH_FILE or \
        $XDG_RUNTIME_DIR/containers/auth.json, as podman and skopeo do.";
    const EXAMPLES: &'static str = "quire login registry.example.com\n  quire login -u robot --password-stdin registry.example.com < token";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        login(context, self)
    }
}

pub(crate) fn login(context: &Context, args: &Login) -> anyhow::Result<Answer> {
    let cancel = Arc::new(AtomicBool::new(false));
    let login = target(context, &args.host, (&args.registry, &args.saved), &cancel)?;
    if args.get_login {
        let user = login.user()?;
        report::line(&user.with_context(|| format!("not logged into {}", login.registry()))?)?;
        return Ok(Answer::Yes);
    }
    let work = || -> anyhow::Result<_> {
        let (user, password) = ask(args, &login, &cancel)?;
        let checked = login.check(&user, &password)?;
        Ok((checked, login.save(&user, &password)?))
    };
    let (checked, kept) = until_signal(&cancel, work)??;
    let registry = login.registry();
    if checked == Checked::Unasked {
        context.remark(&format!(
            "{registry} does not require credentials, so the password was not checked"
        ));
    }
    if context.json {
        report::json(&LoginReport {
            registry: registry.to_owned(),
            checked: checked == Checked::Known,
            kept: KeptReport::from_kept(&kept),
        })?;
    } else {
        tracing::info!(registry, place = place(&kept), "the password is saved");
        // The text is podman's.
        report::line("Login Succeeded!")?;
    }
    Ok(Answer::Yes)
}

/// Returns the user name and the password.
fn ask(args: &Login, login: &Attempt, cancel: &AtomicBool) -> anyhow::Result<(String, Secret)> {
    if let (true, Some(user)) = (args.password_stdin, &args.user) {
        let bytes = read_secret(std::io::stdin().lock()).context("cannot read standard input")?;
        // `echo` and editors append a line feed that is not part of the password.
        let line = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        return Ok((user.clone(), password(line.strip_suffix(b"\r").unwrap_or(line))?));
    }
    if let (Some(given), Some(user)) = (&args.password, &args.user) {
        return Ok((user.clone(), password(given.as_bytes())?));
    }
    let terminal = Terminal::open().context(
        "no terminal to prompt on: -u USER --password-stdin reads the password from standard input",
    )?;
    let registry = login.registry();
    let user = match &args.user {
        Some(user) => user.clone(),
        None => filled("user", terminal.ask(&format!("user for {registry}: "), cancel)?)?,
    };
    let line = terminal.ask_hidden(&format!("password of {user}: "), cancel)?;
    Ok((user, password(&line)?))
}

/// Copies a password out of a buffer. The memory of both is overwritten later.
fn password(bytes: &[u8]) -> anyhow::Result<Secret> {
    let text = std::str::from_utf8(bytes).ok().context("the password is not UTF-8")?;
    Ok(Secret::new(filled("password", text.to_owned())?))
}

fn filled(what: &str, text: String) -> anyhow::Result<String> {
    if text.is_empty() {
        bail!("the {what} is empty");
    }
    Ok(text)
}

fn place(kept: &Kept) -> String {
    match kept {
        Kept::File(path) => format!("in {}", path.display()),
        Kept::Helper { name, file } => {
            format!("by docker-credential-{name}, which {} names", file.display())
        }
    }
}

/// Report of `login --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct LoginReport {
    /// Host of the registry.
    registry: String,
    /// Whether the registry checked the password.
    checked: bool,
    /// Place where the password is saved.
    kept: KeptReport,
}
