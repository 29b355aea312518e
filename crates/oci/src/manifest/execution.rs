//! The settings in a config for containers of the image.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::json::or_default;

/// The default settings for containers of the image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Execution {
    /// `USER` or `USER:GROUP`, by name or number; empty for root.
    #[serde(deserialize_with = "or_default")]
    pub user: String,
    /// Environment variables, as `NAME=VALUE`.
    #[serde(deserialize_with = "or_default")]
    pub env: Vec<String>,
    /// Command, with its first arguments.
    #[serde(deserialize_with = "or_default")]
    pub entrypoint: Vec<String>,
    /// Further arguments, or the command if `entrypoint` is empty.
    #[serde(deserialize_with = "or_default")]
    pub cmd: Vec<String>,
    /// Working directory; empty for `/`.
    #[serde(deserialize_with = "or_default")]
    pub working_dir: String,
    /// Labels by their keys.
    #[serde(deserialize_with = "or_default")]
    pub labels: BTreeMap<String, String>,
    /// Signal that asks the container to stop; empty for SIGTERM.
    #[serde(deserialize_with = "or_default")]
    pub stop_signal: String,
}

impl Execution {
    /// Returns the first setting that contains a NUL byte, for a message.
    pub(super) fn setting_with_nul(&self) -> Option<String> {
        let has_nul = |text: &str| text.contains('\0');
        let texts = [
            ("User", &self.user),
            ("WorkingDir", &self.working_dir),
            ("StopSignal", &self.stop_signal),
        ];
        let text = || texts.iter().find(|it| has_nul(it.1)).map(|it| it.0.to_owned());
        let variable = || {
            let found = self.env.iter().find(|it| has_nul(it))?;
            let name = found.split('=').next().unwrap_or(found);
            Some(format!("variable \"{}\"", name.escape_debug()))
        };
        let argument = |list: &'static str, arguments: &[String]| {
            let index = arguments.iter().position(|it| has_nul(it))?;
            Some(format!("{list}, argument {}", index + 1))
        };
        let label = || {
            let (key, _) =
                self.labels.iter().find(|(key, value)| has_nul(key) || has_nul(value))?;
            Some(format!("label \"{}\"", key.escape_debug()))
        };
        variable()
            .or_else(|| argument("Entrypoint", &self.entrypoint))
            .or_else(|| argument("Cmd", &self.cmd))
            .or_else(text)
            .or_else(label)
    }
}
