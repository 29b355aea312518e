//! Checks whether an image is for the wanted platform.

use super::{ImportContext, ImportOptions};
use crate::progress::Event;
use oci::manifest::{Config, Platform};

/// Whether to accept an image whose config names another platform than [`ImportOptions::platform`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OtherPlatform {
    /// Refuse the image, because the user asked for that platform.
    Refuse,
    /// Accept the image and send [`Event::OtherPlatform`], because the platform is only the default of this machine.
    #[default]
    Tell,
}

/// An image for another platform than the wanted one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the image is for {actual}, not for {wanted}, and no other image is available")]
pub struct PlatformMismatch {
    pub wanted: Box<Platform>,
    /// Platform in the config.
    pub actual: Box<Platform>,
}

/// Compares a config's platform with the wanted one. The platform in an index is no proof: it may be wrong, and many
/// images have no index.
pub(crate) fn check(
    settings: &Config,
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
) -> Result<(), PlatformMismatch> {
    let wanted = options.platform;
    let Some(actual) = settings.platform().filter(|actual| !wanted.may_be(actual)) else {
        return Ok(());
    };
    match options.other_platform {
        OtherPlatform::Refuse => {
            let (wanted, actual) = (Box::new(wanted.clone()), Box::new(actual));
            Err(PlatformMismatch { wanted, actual })
        }
        OtherPlatform::Tell => {
            (environment.progress)(Event::OtherPlatform { image: &actual, wanted });
            Ok(())
        }
    }
}
