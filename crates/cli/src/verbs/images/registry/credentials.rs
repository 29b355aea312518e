//! Credentials for registries, as `login` and `logout` share them.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, bail};
use clap::{Args, ValueHint};
use oci::registry::{Kept, Login as Attempt, Settings};
use serde::Serialize;

use crate::args;
use crate::session::context::Context;
use crate::verbs::images::registry::pull::{lenient_settings, pauses};

// Where credentials are saved.
#[derive(Debug, Args)]
pub(crate) struct SavedOption {
    /// Save credentials in this file, in the format of Docker's config.json
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) compat_auth_file: Option<PathBuf>,
}

/// Returns the settings for the files with credentials, of which the first one is written.
pub(crate) fn settings_of_files(
    context: &Context,
    (options, saved): (&args::RegistryOptions, &SavedOption),
    cancel: &Arc<AtomicBool>,
) -> anyhow::Result<Settings> {
    let mut settings = lenient_settings(context.who(), options, cancel, pauses(context))?;
    if let Some(file) = &saved.compat_auth_file {
        if options.authfile.is_some() {
            // The text is podman's.
            bail!(
                "options for paths to the credential file and to the Docker-compatible credential file can not be set \
                simultaneously"
            );
        }
        settings.keyring.files.insert(0, file.clone());
    }
    Ok(settings)
}

pub(crate) fn target(
    context: &Context,
    host: &str,
    options: (&args::RegistryOptions, &SavedOption),
    cancel: &Arc<AtomicBool>,
) -> anyhow::Result<Attempt> {
    let settings = settings_of_files(context, options, cancel)?;
    Attempt::new(host, &settings).with_context(|| {
        format!(
            "\"{}\" is not a registry: write it like ghcr.io or localhost:5000",
            host.escape_debug()
        )
    })
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct KeptReport {
    /// Name of the credential helper that has the password. Absent if the file itself has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    helper: Option<String>,
    /// The file that has the password, or names the helper.
    file: String,
}

impl KeptReport {
    pub(crate) fn from_kept(kept: &Kept) -> Self {
        let (helper, file) = match kept {
            Kept::File(file) => (None, file),
            Kept::Helper { name, file } => (Some(name.clone()), file),
        };
        Self { helper, file: file.display().to_string() }
    }
}
