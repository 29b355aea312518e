//! Images for another platform than the wanted one.

use super::{ImportContext, ImportOptions};
use crate::progress::Event;
use oci::manifest::{Config, Platform};

/// Whether to take an image whose config names another platform than [`ImportOptions::platform`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OtherPlatform {
    /// Refuse it: the user asked for that platform.
    Refuse,
    /// Take it, and send [`Event::OtherPlatform`]: the platform is only a default, this machine's.
    #[default]
    Tell,
}

/// An image for another platform than the wanted one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the image is for {actual}, not for {wanted}, and there is no other to choose")]
pub struct PlatformMismatch {
    /// The wanted platform.
    pub wanted: Box<Platform>,
    /// The platform in the config.
    pub actual: Box<Platform>,
}

/// Compares what a config says with what is wanted. An index is no proof: what it says of its entries may be wrong, and
/// many images have none.
pub(crate) fn check(
    settings: &Config,
    surroundings: &ImportContext<'_>,
    wishes: &ImportOptions<'_>,
) -> Result<(), PlatformMismatch> {
    let wanted = wishes.platform;
    let Some(actual) = settings.platform().filter(|actual| !wanted.may_be(actual)) else {
        return Ok(());
    };
    match wishes.other_platform {
        OtherPlatform::Refuse => {
            let (wanted, actual) = (Box::new(wanted.clone()), Box::new(actual));
            Err(PlatformMismatch { wanted, actual })
        }
        OtherPlatform::Tell => {
            (surroundings.progress)(Event::OtherPlatform { image: &actual, wanted });
            Ok(())
        }
    }
}
