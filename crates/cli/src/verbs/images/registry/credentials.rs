//! Credentials for registries, as `login` and `logout` share them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use oci::registry::{Kept, Login as Attempt};
use serde::Serialize;

use crate::args;
use crate::session::context::Context;
use crate::verbs::images::registry::pull::{lenient_settings, pauses};

pub(crate) fn target(
    context: &Context,
    host: &str,
    options: &args::RegistryOptions,
    cancel: &Arc<AtomicBool>,
) -> anyhow::Result<Attempt> {
    let settings = lenient_settings(context.who(), options, cancel, pauses(context))?;
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
