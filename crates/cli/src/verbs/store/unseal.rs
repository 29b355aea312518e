//! `unseal`: clears the immutable flag of the store's files.

use clap::Args;
use serde::Serialize;
use store::OpenOptions;

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Unseal {}

impl VerbArgs for Unseal {
    const NAME: &'static str = "unseal";
    const ABOUT: &'static str = "Clear the immutable flag of a store, so that it can be removed";
    const EXAMPLES: &'static str = "quire unseal --store ./store";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        unseal(context)
    }
}

pub(crate) fn unseal(context: &Context) -> anyhow::Result<Answer> {
    let unsealed = context.open(OpenOptions::write())?.unseal()?;
    if context.json {
        report::json(&UnsealReport { unsealed })?;
    } else {
        let files = report::count(unsealed, "file");
        context.remark(&format!("the immutable flag of {files} is cleared"));
    }
    Ok(Answer::Yes)
}

/// Report of `unseal --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct UnsealReport {
    /// Number of files that are no longer immutable.
    unsealed: u64,
}
