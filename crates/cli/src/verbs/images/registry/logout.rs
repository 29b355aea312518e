//! `logout`: removes saved credentials.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use serde::Serialize;

use crate::Answer;
use crate::args::RegistryOptions;
use crate::output::report;
use crate::session::context::Context;
use crate::verbs::VerbArgs;
use crate::verbs::images::registry::credentials::{
    KeptReport, SavedOption, settings_of_files, target,
};

// The registry whose credentials are removed.
#[derive(Debug, Args)]
pub(crate) struct Logout {
    /// The registry, as for `login`
    #[arg(required_unless_present = "all")]
    pub(crate) host: Option<String>,
    /// Remove the credentials of all registries that the first file with credentials has
    #[arg(short, long, conflicts_with = "host")]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) saved: SavedOption,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

impl VerbArgs for Logout {
    const NAME: &'static str = "logout";
    const ABOUT: &'static str = "Remove the saved user name and password of a registry";
    const EXAMPLES: &'static str = "quire logout registry.example.com\n  quire logout --all";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        logout(context, self)
    }
}

pub(crate) fn logout(context: &Context, args: &Logout) -> anyhow::Result<Answer> {
    let cancel = Arc::new(AtomicBool::new(false));
    let options = (&args.registry, &args.saved);
    let Some(host) = &args.host else {
        let removed = settings_of_files(context, options, &cancel)?.keyring.erase_all()?;
        if let Some(file) = &removed.left {
            let file = file.display();
            context.remark(&format!("{file}, a file of another tool, still has credentials"));
        }
        if context.json {
            report::json(&LogoutReport {
                registry: None,
                removed: removed.from.iter().map(KeptReport::from_kept).collect(),
                left: removed.left.as_ref().map(|it| it.display().to_string()),
            })?;
        } else {
            // The text is podman's.
            report::line("Removed login credentials for all registries")?;
        }
        return Ok(Answer::Yes);
    };
    let login = target(context, host, options, &cancel)?;
    let removed = login.erase()?;
    let registry = login.registry();
    let answer = if removed.from.is_empty() { Answer::No } else { Answer::Yes };
    if let Some(file) = &removed.left {
        let file = file.display();
        context.remark(&format!(
            "{file}, a file of another tool, still has credentials for {registry}"
        ));
    }
    if context.json {
        report::json(&LogoutReport {
            registry: Some(registry.to_owned()),
            removed: removed.from.iter().map(KeptReport::from_kept).collect(),
            left: removed.left.as_ref().map(|it| it.display().to_string()),
        })?;
    } else if answer == Answer::No {
        report::error_line(&format!("quire: not logged in to {registry}"));
    } else {
        // The text is podman's.
        report::line(&format!("Removed login credentials for {registry}"))?;
    }
    Ok(answer)
}

/// Report of `logout --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct LogoutReport {
    /// Host of the registry. Null with `--all`.
    registry: Option<String>,
    /// Places from which the password was removed.
    removed: Vec<KeptReport>,
    /// File of another tool that still has the password. Null if there is none.
    left: Option<String>,
}
