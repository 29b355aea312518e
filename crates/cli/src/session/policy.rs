//! Loads the policies in force, and checks images against them before use.

use std::path::{Path, PathBuf};

use anyhow::bail;
use oci::policy::{Default, Policies};
use store::{Permitted, Resolved, Store, UsePolicy};
use transfer::evidence::{UseError, check_use};

use crate::session::context::Context;
use crate::session::settings::user_config::user_config;

/// The administrator's policy, which users cannot replace.
const SYSTEM: &str = "/etc/quire/policy.toml";

/// Name of the user's policy in its directory.
const NAME: &str = "policy.toml";

/// Loads the policies in force: the administrator's policy, and the user's policy, which can only add restrictions.
pub(crate) fn policies(context: &Context) -> anyhow::Result<Policies> {
    let named = context.policy();
    let other = named.map_or_else(|| user_config(context.who(), NAME), |it| Some(it.to_owned()));
    load(named, other)
}

/// Loads the policies for a program that the host's engine calls: the administrator's policy, and the one that this
/// variable names.
#[cfg(feature = "registry")]
pub(crate) fn policies_of_host(named: Option<&Path>) -> anyhow::Result<Policies> {
    load(named, named.map(Path::to_owned))
}

/// Loads the administrator's policy, and another one, which must exist if the user named it.
fn load(named: Option<&Path>, other: Option<PathBuf>) -> anyhow::Result<Policies> {
    let mut files = vec![PathBuf::from(SYSTEM)];
    files.extend(other);
    let policies = Policies::load(&files)?;
    // The default files are optional. If a file that the user named is missing, the name is wrong, or the file is just
    // being replaced. No image may be used until the file exists.
    if let Some(named) = named.filter(|it| !policies.all().iter().any(|policy| policy.file == **it))
    {
        bail!("there is no policy {}", named.display());
    }
    Ok(policies)
}

/// The policies in force, as the check that the store calls.
struct InForce(Policies);

impl UsePolicy for InForce {
    type Refusal = UseError;

    fn check(&self, store: &Store, found: &Resolved) -> Result<(), UseError> {
        for key in check_use(&self.0, store, found)?.signed_by {
            tracing::info!(image = %found.image, key = %key.display(), "signed");
        }
        Ok(())
    }
}

/// Refuses an image that a policy does not accept, from the evidence in the store.
pub(crate) fn permit(
    context: &Context,
    store: &Store,
    found: Resolved,
) -> anyhow::Result<Permitted> {
    Ok(store.permit(&InForce(policies(context)?), found)?)
}

/// Describes the policies in force in one line for people.
pub(crate) fn describe(context: &Context) -> Result<String, String> {
    let policies = match policies(context) {
        Ok(policies) => policies,
        Err(error) => return Err(format!("no image is accepted: {error:#}")),
    };
    let one = |it: &oci::policy::Policy| {
        let default = match it.default {
            Default::Any => "accepted",
            Default::None => "refused",
        };
        let (file, count) = (it.file.display(), it.rules.len());
        format!("{file} ({count} rules, all others are {default})")
    };
    let all: Vec<_> = policies.all().iter().map(one).collect();
    if all.is_empty() {
        return Ok(format!("none: any image is accepted, signed or not ({SYSTEM} does not exist)"));
    }
    Ok(all.join(" and "))
}
