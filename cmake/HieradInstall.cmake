# cmake --install: programs, the maker of certificates and the systemd units. Programs are copied as they are: hiera-worker goes
# on using the LibTorch that it was built with, where that lies.
include(GNUInstallDirs)
foreach(program hierad hierad-agent hierctl hiera-worker)
  if(TARGET ${program})
    install(PROGRAMS $<TARGET_FILE:${program}> DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endforeach()
install(PROGRAMS ${PROJECT_SOURCE_DIR}/deploy/certs DESTINATION ${CMAKE_INSTALL_BINDIR} RENAME hierad-certs)
install(FILES ${PROJECT_SOURCE_DIR}/deploy/systemd/hierad.service ${PROJECT_SOURCE_DIR}/deploy/systemd/hierad-agent.service
  DESTINATION lib/systemd/system)
