# cpack -G DEB (tools/package): two Debian packages.
#   hierad        hierad, hierad-agent, hierctl, hierad-certs, the units, manual page, completions
#   hiera-worker  the worker, and beside it in /usr/lib/hierad the LibTorch that it was built with and what LibTorch brings along.
#                 With HIERAD_CUDA the CUDA toolkit, cuDNN and NCCL stay the machine's.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME hierad)
set(CPACK_PACKAGE_VENDOR hierad)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_COMPONENTS_ALL hierad hiera-worker)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_CURRENT_LIST_DIR}/package_prepare.cmake)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(HIERAD_MAINTAINER "hierad maintainers <hierad@packages.invalid>" CACHE STRING "Maintainer in the Debian packages")
set(CPACK_DEBIAN_PACKAGE_MAINTAINER "${HIERAD_MAINTAINER}")
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_COMPRESSION_TYPE gzip)   # xz takes minutes for LibTorch

set(_packages ${PROJECT_SOURCE_DIR}/deploy/packages)
set(CPACK_DEBIAN_HIERAD_PACKAGE_NAME hierad)
set(CPACK_COMPONENT_HIERAD_DESCRIPTION "training daemon for Hiera masked auto-encoders
hierad queues, places and follows training jobs of Hiera masked
auto-encoders on GPUs and CPUs. This package holds hierad itself, the agent
of a node, the command line client hierctl, and units for systemd. The ranks
are processes of hiera-worker, a package of its own.")
set(CPACK_DEBIAN_HIERAD_PACKAGE_DEPENDS "openssl")   # hierad-certs calls it
set(CPACK_DEBIAN_HIERAD_PACKAGE_RECOMMENDS "hiera-worker (= ${PROJECT_VERSION}-1)")
set(CPACK_DEBIAN_HIERAD_PACKAGE_CONTROL_EXTRA ${_packages}/hierad/postinst;${_packages}/hierad/prerm;${_packages}/hierad/postrm;${_packages}/hierad/conffiles)
set(CPACK_DEBIAN_HIERAD_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(CPACK_DEBIAN_HIERA-WORKER_PACKAGE_NAME hiera-worker)
set(CPACK_COMPONENT_HIERA-WORKER_DESCRIPTION "training worker of hierad
One process of it is one rank of a job: it trains a Hiera masked
auto-encoder on one GPU, or on some cores. It brings the LibTorch that it was
built with, in a folder of its own.")
set(CPACK_DEBIAN_HIERA-WORKER_PACKAGE_DEPENDS "hierad (= ${PROJECT_VERSION}-1)")
set(CPACK_DEBIAN_HIERA-WORKER_PACKAGE_SHLIBDEPS_PRIVATE_DIRS /usr/lib/hierad)

# For package_prepare.cmake.
set(CPACK_HIERAD_SOURCE ${PROJECT_SOURCE_DIR})
set(CPACK_HIERAD_SITE_PACKAGES "${HIERAD_SITE_PACKAGES}")
set(CPACK_HIERAD_BIN ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
set(CPACK_HIERAD_STRIP "${CMAKE_STRIP}")
include(CPack)
